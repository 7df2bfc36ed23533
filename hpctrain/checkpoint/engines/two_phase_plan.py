"""Plans which rank writes what in one turn of a two-phase write: pure.

Each rank holds a batch of byte ranges, and reports its extent in the file and the number and size of its pieces. Ranks
write large pieces themselves, since moving them would gain nothing. Batches of small pieces with overlapping extents
are redistributed: the overlapping part of the file is divided into domains, one per writing rank, and each writer
receives all bytes in its domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# With a smaller mean size, and at least so many pieces, sending them to another rank is cheaper than writing each.
SMALL_PIECE_BYTES = 64 << 10
MANY_PIECES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchExtent:
    """Extent of one rank's batch in the file: first byte, end (exclusive), number of contiguous pieces, total bytes."""

    begin: int
    end: int
    num_pieces: int
    num_bytes: int

    @property
    def is_scattered(self) -> bool:
        return self.num_pieces >= MANY_PIECES and self.num_bytes < SMALL_PIECE_BYTES * self.num_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeRound:
    """Plan of one turn. alone: ranks that write their whole batch themselves. together: ranks that redistribute their
    bytes in begin <= byte < until. The remaining bytes wait for a later turn."""

    alone: frozenset[int]
    together: frozenset[int]
    begin: int
    until: int


def plan_turn(reaches: Sequence[BatchExtent | None], *, max_span: int) -> ExchangeRound:
    """Returns the plan of the next turn, in which at least one rank makes progress.

    reaches: extent of each rank's batch; None if it is empty. max_span: maximum length of the redistributed part of the
    file, in bytes, and so of the bytes in flight, since the ranks' bytes do not overlap.
    """
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
    """Divides the bytes begin <= byte < until into one domain per rank. Returns num_ranks + 1 boundaries.

    Only `num_writers` ranks, spread evenly, have a domain that is not empty. Boundaries between domains are multiples
    of `block_bytes`, so that no two ranks write to the same block.
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
    byte_ranges: Iterable[tuple[int, memoryview]], *, places: Sequence[int]
) -> list[list[tuple[int, memoryview]]]:
    """Cuts byte ranges (ascending, none empty) at the domain boundaries. Returns for each rank those in its domain.

    places: the boundaries, from `domains`.
    """
    parts: list[list[tuple[int, memoryview]]] = [[] for _ in places[1:]]
    rank = 0
    for offset, view in byte_ranges:
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
