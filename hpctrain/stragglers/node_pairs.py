"""Times messages between pairs of nodes, many pairs at once: each node is in one pair at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpctrain.comm import Transport, receive_message, send_message

LATENCY_TRIALS = 10
BANDWIDTH_TRIALS = 3
# One message that takes longer shows the link's rate: no further trials.
SLOW_S = 0.05
_SMALL_BYTES = 8
_WAIT = "a message of the probe between nodes"
_LAST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpeed:
    """latency_s: of a message of 8 bytes, one way. bytes_per_s: of large ones, the mean of both directions."""

    latency_s: float
    bytes_per_s: float


def partner_of(node: int, *, number: int, num_nodes: int) -> int | None:
    """Returns the other node of `node`'s pair in round `number`; None if it is in none. Pure.

    In rounds 0 to num_rounds - 1 every two nodes are a pair once (the circle method of tournaments).
    """
    even = num_nodes + num_nodes % 2  # a node that is not there makes their number even
    last = even - 1
    if node == last:
        partner = number * (even // 2) % last  # even // 2 is the inverse of 2 modulo an odd number
    else:
        partner = (number - node) % last
        if partner == node:
            partner = last
    return partner if partner < num_nodes else None


def num_rounds(num_nodes: int) -> int:
    """Returns the rounds in which all pairs have met."""
    return num_nodes + num_nodes % 2 - 1


def chosen_rounds(num_nodes: int, *, at_most: int | None) -> Sequence[int]:
    """Returns the numbers of the rounds to measure: all, or `at_most` of them, evenly spread. Pure."""
    total = num_rounds(num_nodes)
    if at_most is None or total <= at_most:
        return range(total)
    return [number * total // at_most for number in range(at_most)]


def measure_pair(transport: Transport, *, peer: int, num_bytes: int) -> PairSpeed:
    """Returns the speed between this rank and rank `peer`, which must call this too; both get the same result.

    A message travels there and back before the next one, so that no buffer on the way can hide the link's rate. The
    fastest of a few trials counts. num_bytes: of a large message.
    """
    small = torch.zeros(_SMALL_BYTES, dtype=torch.uint8)
    large = torch.zeros(num_bytes, dtype=torch.uint8)
    result = torch.zeros(2, dtype=torch.float64)
    as_bytes = result.view(torch.uint8)
    begins = transport.rank < peer
    _swap(transport, small, peer=peer, begins=begins)  # opens the connection, and waits until both are here
    if not begins:
        for _ in range(LATENCY_TRIALS):
            _swap(transport, small, peer=peer, begins=False)
        while True:
            _swap(transport, large, peer=peer, begins=False)
            if int(large[0]) == _LAST:
                break
        receive_message(transport, as_bytes, source=peer, what=_WAIT)
        return PairSpeed(latency_s=float(result[0]), bytes_per_s=float(result[1]))
    latency_s = min(_round_trip_s(transport, small, peer=peer) for _ in range(LATENCY_TRIALS)) / 2
    trips_s: list[float] = []
    while not int(large[0]):
        if len(trips_s) == BANDWIDTH_TRIALS - 1 or (trips_s and trips_s[-1] > SLOW_S):
            large[0] = _LAST
        trips_s.append(_round_trip_s(transport, large, peer=peer))
    result[0], result[1] = latency_s, 2 * num_bytes / max(min(trips_s), 1e-9)
    send_message(transport, as_bytes, to=peer, what=_WAIT)
    return PairSpeed(latency_s=latency_s, bytes_per_s=float(result[1]))


def _round_trip_s(transport: Transport, buffer: torch.Tensor, *, peer: int) -> float:
    began = time.perf_counter()
    _swap(transport, buffer, peer=peer, begins=True)
    return time.perf_counter() - began


def _swap(transport: Transport, buffer: torch.Tensor, *, peer: int, begins: bool) -> None:
    """Sends `buffer` to the peer and back, from the side that begins."""
    for send in (begins, not begins):
        if send:
            send_message(transport, buffer, to=peer, what=_WAIT)
        else:
            receive_message(transport, buffer, source=peer, what=_WAIT)
