"""Who writes in one turn of writing together: pure.

Each rank holds a batch of stretches, and all know from where to where each batch reaches. Batches that reach into
nobody else's are written by their ranks alone. Batches that reach into each other are written together, up to
where the first of them ends: so what is written together lies close, and collective modules that fill gaps
by reading do not read half the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """alone: ranks that write their whole batch by themselves. together: ranks that write, with all others
    taking part, what of their batches lies before byte `until`. Ranks in neither wait for a later turn."""

    alone: frozenset[int]
    together: frozenset[int]
    until: int


def plan_turn(reaches: Sequence[tuple[int, int] | None]) -> Turn:
    """reaches: of each rank's batch, its first byte and the one after its last; None: it has nothing left.

    At least one rank finishes its batch in each turn.
    """
    ordered = sorted((reach, rank) for rank, reach in enumerate(reaches) if reach is not None)
    knots: list[list[int]] = []
    end = -1
    for (begin, stop), rank in ordered:
        if knots and begin < end:
            knots[-1].append(rank)
        else:
            knots.append([rank])
        end = max(end, stop)
    alone = frozenset(knot[0] for knot in knots if len(knot) == 1)
    shared = next((knot for knot in knots if len(knot) > 1), [])
    until = min((reach[1] for rank in shared if (reach := reaches[rank]) is not None), default=0)
    return Turn(alone=alone, together=frozenset(shared), until=until)
