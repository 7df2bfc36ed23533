"""Measures the rate of the links between nodes with plain messages."""

from __future__ import annotations

import time

import torch

from hpctrain.comm import Collective, ReduceOp, Transport

MESSAGE_BYTES = 1 << 20
ROUNDS = 3
ROUND_S = 0.5
MAX_MESSAGES = 2048


def measure_link(transport: Transport, *, comm: Collective) -> float | None:
    """Returns the bytes/s that each node sends while it receives as many, best of three rounds; None on one node.

    The first rank of each node sends plain messages to the first rank of the next node, several at a time; the other
    ranks wait. A round takes as long as its slowest node. Takes about 2 s. Collective.
    """
    firsts = [ranks[0] for ranks in transport.topology.ranks_by_node]
    if len(firsts) == 1:
        return None
    seconds = _shift(transport, comm=comm, firsts=firsts, num_messages=4)  # also opens the connections
    seconds = _shift(transport, comm=comm, firsts=firsts, num_messages=8)
    num_messages = min(MAX_MESSAGES, max(8, round(8 * ROUND_S / seconds)))
    best_s = min(
        _shift(transport, comm=comm, firsts=firsts, num_messages=num_messages) for _ in range(ROUNDS)
    )
    return num_messages * MESSAGE_BYTES / best_s


def _shift(transport: Transport, *, comm: Collective, firsts: list[int], num_messages: int) -> float:
    """Seconds of the slowest rank for `num_messages` to the next node, four of them in flight at once. Collective."""
    outgoing = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    incoming = [torch.empty_like(outgoing) for _ in range(4)]
    comm.barrier()
    started = time.perf_counter()
    if transport.rank in firsts:
        place = firsts.index(transport.rank)
        to, source = firsts[(place + 1) % len(firsts)], firsts[place - 1]
        for begin in range(0, num_messages, len(incoming)):
            count = min(len(incoming), num_messages - begin)
            pending = [transport.receive(incoming[n], source=source, tag=n) for n in range(count)]
            pending += [transport.send(outgoing, to=to, tag=n) for n in range(count)]
            while not transport.all_done(pending):
                time.sleep(50e-6)
    longest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    comm.all_reduce(longest, op=ReduceOp.MAX)
    return float(longest)
