"""Who writes what in one turn of writing a file with several ranks: pure.

Each rank holds a batch of stretches, and says from where to where it reaches and whether it is of many small
pieces. Large pieces are written by their ranks alone: nobody gains by moving them. Batches of small pieces that
reach into each other are brought together: up to where the first of them ends, the file is divided into domains,
one for each rank that writes, and each gets all that lies in its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Below this mean, and from so many pieces on, moving bytes between ranks is cheaper than one write for each.
SMALL_PIECE_BYTES = 64 << 10
MANY_PIECES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchExtent:
    """Of one rank's batch: first byte, the one after the last, and how many runs of how many bytes it has."""

    begin: int
    end: int
    num_pieces: int
    num_bytes: int

    @property
    def is_scattered(self) -> bool:
        return self.num_pieces >= MANY_PIECES and self.num_bytes < SMALL_PIECE_BYTES * self.num_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeRound:
    """alone: ranks that write their whole batch by themselves. together: ranks whose batches may reach into
    begin <= byte < until, and who give away what lies there. The rest waits for a later turn."""

    alone: frozenset[int]
    together: frozenset[int]
    begin: int
    until: int


def plan_turn(reaches: Sequence[BatchExtent | None], *, max_span: int) -> ExchangeRound:
    """reaches: of each rank's batch; None: it has nothing left. max_span: bytes of the file that are brought together
    at most; nothing overlaps, so no more than that are on their way. Some rank gets on in every turn."""
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
    begin = min((begin for begin, _, rank in scattered if rank in first), default=0)
    end = min((end for _, end, rank in scattered if rank in first), default=0)
    return ExchangeRound(
        alone=frozenset(alone), together=frozenset(first), begin=begin, until=min(end, begin + max_span)
    )


def domains(*, begin: int, until: int, num_ranks: int, num_writers: int, block_bytes: int) -> list[int]:
    """Where each rank's domain of the bytes begin <= byte < until starts, and at last `until`: num_ranks + 1 places.

    num_writers: of the ranks have a domain, spread evenly over them; the others' are empty. Domains meet at
    multiples of block_bytes, which no two ranks then write to.
    """
    writers = sorted({number * num_ranks // num_writers for number in range(min(num_writers, num_ranks))})
    places, number = [begin], 0
    for rank in range(num_ranks):
        if number < len(writers) and rank == writers[number]:
            number += 1
            cut = begin + (until - begin) * number // len(writers)
            end = until if number == len(writers) else cut - cut % block_bytes
            places.append(max(places[-1], end))
        else:
            places.append(places[-1])
    return places


def dealt(
    stretches: Iterable[tuple[int, memoryview]], *, places: Sequence[int]
) -> list[list[tuple[int, memoryview]]]:
    """Ascending stretches, none empty, cut where domains meet: for each rank what lies in its own.

    places: of `domains`.
    """
    parts: list[list[tuple[int, memoryview]]] = [[] for _ in places[1:]]
    rank = 0
    for offset, view in stretches:
        while True:
            while offset >= places[rank + 1]:
                rank += 1
            count = places[rank + 1] - offset
            if view.nbytes <= count:
                parts[rank].append((offset, view))
                break
            parts[rank].append((offset, view[:count]))
            offset, view = offset + count, view[count:]
    return parts
