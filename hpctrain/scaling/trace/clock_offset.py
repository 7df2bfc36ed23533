"""Measures the offsets between the nodes' monotonic clocks with messages that travel there and back.

Source: F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989. The other clock is assumed to
be read halfway through a round trip; the error is at most half the duration of the trip. Of several trips, the shortest
trip has the smallest error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hpctrain.comm import Transport, World, receive_message, send_message
from hpctrain.topology import Topology

_TRIPS = 20
_WHAT = "a message that compares the clocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The offset of rank 0's clock from this rank's clock; both clocks are `time.perf_counter`.

    When this rank's clock was at `clock_s`, rank 0's clock was at `clock_s + offset_s`. error_s: the largest possible
    error of the offset.
    """

    clock_s: float
    offset_s: float
    error_s: float


def measure_clock_offset(world: World, topology: Topology) -> ClockOffset:
    """Compares this rank's clock with rank 0's. Collective.

    The ranks of a node share one clock (`CLOCK_MONOTONIC` on Linux). The first ranks of the nodes, one after another,
    compare this clock with rank 0's, and all ranks of a node use the result. The offset is exactly 0 if there is only
    one node, or if the backend has no point-to-point messages.
    """
    here = ClockOffset(clock_s=time.perf_counter(), offset_s=0.0, error_s=0.0)
    if topology.num_nodes == 1 or (transport := world.transport(topology)) is None:
        return here
    transport.begun("comparison of the clocks")
    leaders = [ranks[0] for ranks in topology.ranks_by_node]
    if world.rank == 0:
        for leader in leaders[1:]:
            _answer(transport, peer=leader)
    elif world.rank in leaders:
        here = _ask(transport)
    transport.close()
    mine = torch.tensor([here.clock_s, here.offset_s, here.error_s], dtype=torch.float64)
    if world.rank not in leaders:
        mine = mine[:0]
    counts = [3 if rank in set(leaders) else 0 for rank in range(world.num_ranks)]
    every = world.all_gather(mine, counts=counts).view(-1, 3)
    clock_s, offset_s, error_s = every[topology.node_of(world.rank)].tolist()
    return ClockOffset(clock_s=clock_s, offset_s=offset_s, error_s=error_s)


def _ask(transport: Transport) -> ClockOffset:
    clock = torch.zeros(1, dtype=torch.float64)
    buffer = clock.view(torch.uint8)
    best = ClockOffset(clock_s=0.0, offset_s=0.0, error_s=float("inf"))
    for _ in range(_TRIPS):
        began = time.perf_counter()
        send_message(transport, buffer, to=0, what=_WHAT)
        receive_message(transport, buffer, source=0, what=_WHAT)
        ended = time.perf_counter()
        if (ended - began) / 2 < best.error_s:
            middle = (began + ended) / 2
            best = ClockOffset(clock_s=middle, offset_s=float(clock) - middle, error_s=(ended - began) / 2)
    return best


def _answer(transport: Transport, *, peer: int) -> None:
    clock = torch.zeros(1, dtype=torch.float64)
    buffer = clock.view(torch.uint8)
    for _ in range(_TRIPS):
        receive_message(transport, buffer, source=peer, what=_WHAT)
        clock[0] = time.perf_counter()
        send_message(transport, buffer, to=peer, what=_WHAT)
