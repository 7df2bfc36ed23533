"""A barrier that gives up: for groups, and single barriers, that a program gave a timeout of its own."""

from __future__ import annotations

import time

import torch

from hpctrain.comm import PeerMessages
from hpctrain.errors import CommunicationError

_SLEEP_S = 1e-3


def barrier_with_timeout(
    messages: PeerMessages, *, rank: int, num_ranks: int, tag: int, timeout_s: float
) -> None:
    """Returns when all ranks of the group have called it. Collective.

    tag: of its messages, used for nothing else. Raises CommunicationError after timeout_s; the ranks may then be at
    different operations, so that the group cannot be used any more. MPI's barrier could not be left: this one is the
    dissemination barrier (Hensgen, Finkel and Manber 1988), log2(num_ranks) rounds of empty messages.
    """
    until = time.monotonic() + timeout_s
    distance = 1
    while distance < num_ranks:
        source = (rank - distance) % num_ranks
        pending = [
            messages.send(torch.empty(0, dtype=torch.uint8), to=(rank + distance) % num_ranks, tag=tag),
            messages.receive(torch.empty(0, dtype=torch.uint8), source=source, tag=tag),
        ]
        while not all(map(messages.finished, pending)):
            if time.monotonic() > until:
                raise CommunicationError(
                    f"barrier of {num_ranks} ranks: rank {rank} of the group has waited for rank {source} longer than "
                    f"its timeout of {timeout_s:g} s: find out where that rank is, or give new_group or barrier a "
                    "longer timeout"
                )
            time.sleep(_SLEEP_S)
        distance *= 2
