"""Who writes in one turn of writing a file with several ranks: pure.

Each rank holds a batch of stretches, and says from where to where it reaches and whether it is of many small
pieces. Large pieces are written by their ranks alone: nobody gains by moving them. Batches of small pieces that
reach into each other are written together, up to where the first of them ends: so what is written together lies
close, and modules that fill gaps by reading do not read half the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Below this mean, and from so many pieces on, moving bytes between ranks is cheaper than one write for each.
SMALL_PIECE_BYTES = 64 << 10
MANY_PIECES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Of one rank's batch: first byte, the one after the last, and how many runs of how many bytes it has."""

    begin: int
    end: int
    num_pieces: int
    num_bytes: int

    @property
    def is_scattered(self) -> bool:
        return self.num_pieces >= MANY_PIECES and self.num_bytes < SMALL_PIECE_BYTES * self.num_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """alone: ranks that write their whole batch by themselves, first. together: ranks that then write, with all
    others taking part, what of their batches lies before byte `until`. The rest waits for a later turn."""

    alone: frozenset[int]
    together: frozenset[int]
    until: int


def plan_turn(reaches: Sequence[Reach | None]) -> Turn:
    """reaches: of each rank's batch; None: it has nothing left. At least one rank finishes its batch in each turn."""
    scattered = sorted(
        (reach.begin, reach.end, rank)
        for rank, reach in enumerate(reaches)
        if reach is not None and reach.is_scattered
    )
    knots: list[list[int]] = []
    reached = -1
    for begin, end, rank in scattered:
        if knots and begin < reached:
            knots[-1].append(rank)
        else:
            knots.append([rank])
        reached = max(reached, end)
    knotted = {rank for knot in knots if len(knot) > 1 for rank in knot}
    alone = {rank for rank, reach in enumerate(reaches) if reach is not None and rank not in knotted}
    first = next((knot for knot in knots if len(knot) > 1), [])
    until = min((end for _, end, rank in scattered if rank in first), default=0)
    return Turn(alone=frozenset(alone), together=frozenset(first), until=until)
