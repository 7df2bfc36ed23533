"""Prepares byte ranges that are written to a file: batches of bounded size, rate limit, joining of neighbours."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

# Plans which rank writes what in one turn of a two-phase write: pure.
#
# Each rank holds a batch of byte ranges, and reports its extent in the file and the number and size of its
# pieces. Ranks write large pieces themselves, since moving them would gain nothing. Batches of small pieces
# with overlapping extents are redistributed: the overlapping part of the file is divided into domains, one
# per writing rank, and each writer receives all bytes in its domain.


# With a smaller mean size, and at least so many pieces, sending them to another rank is cheaper than writing each.
SMALL_PIECE_BYTES = 64 << 10
MANY_PIECES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchExtent:
    """The part of a file in which the bytes lie that one rank is about to write (its batch).

    The part begins at `begin` and ends before `end`. The batch consists of `num_pieces` contiguous pieces with
    `num_bytes` bytes in total; there may be gaps between the pieces.
    """

    begin: int
    end: int
    num_pieces: int
    num_bytes: int

    @property
    def is_scattered(self) -> bool:
        return self.num_pieces >= MANY_PIECES and self.num_bytes < SMALL_PIECE_BYTES * self.num_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeRound:
    """Plan of one turn of a two-phase write. In a turn, each rank of a file writes bytes of its current batch.

    The ranks in `alone` write their whole batch by themselves. The ranks in `together` redistribute among each
    other their bytes at the file offsets begin <= offset < until, and write them. All other bytes wait for a later
    turn.
    """

    alone: frozenset[int]
    together: frozenset[int]
    begin: int
    until: int


def plan_turn(reaches: Sequence[BatchExtent | None], *, max_span: int) -> ExchangeRound:
    """Plans the next turn of a collective write to a file, in which at least one rank makes progress.

    `reaches` contains, for each rank, the part of the file that its batch covers; None: the batch is empty. `max_span`
    is the maximum length in bytes of the part of the file whose bytes the ranks redistribute. It also limits the bytes
    in flight, since the ranks' bytes do not overlap.
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
    """Divides the file offsets begin <= offset < until into one contiguous domain per rank.

    Returns the num_ranks + 1 boundaries of the domains. Only `num_writers` ranks, spread evenly, have a domain that is
    not empty. Boundaries between domains are multiples of `block_bytes`, so that no two ranks write to the same block.
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
    """Divides byte ranges, (offset, bytes), among the ranks: each rank gets the parts that lie in its domain.

    The domain of rank r are the file offsets from places[r] to places[r + 1] - 1 (see `domains`). The byte ranges must
    be ascending, and none may be empty.
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


# Byte ranges to be written to a file.


# Offset in the file, and the bytes: one-dimensional, contiguous.
ByteRange: TypeAlias = tuple[int, memoryview]

# Smaller neighbours are joined, since a write costs as much as copying some tens of KiB.
_JOIN_BELOW_BYTES = 1 << 18
_SHORTEST_SLEEP_S = 0.01


@final
class WriteBatch:
    """The byte ranges that a rank will write next, sorted by file offset, with at most `max_bytes` bytes at a time.

    The bytes of the views must not change until they have been taken and written.
    """

    def __init__(self, byte_ranges: Iterable[ByteRange], *, max_bytes: int) -> None:
        self._source = iter(byte_ranges)
        self.max_bytes = max_bytes
        self._cut: ByteRange | None = None  # the rest of a byte range that did not fit
        self._byte_ranges: list[ByteRange] = []
        self._num_bytes = 0

    def fill(self) -> None:
        """Takes byte ranges from the iterator until the batch is full or the iterator ends. Raises its errors."""
        while self._num_bytes < self.max_bytes:
            item = self._cut or next(self._source, None)
            self._cut = None
            if item is None:
                break
            offset, view = item
            free_bytes = self.max_bytes - self._num_bytes
            if view.nbytes > free_bytes:
                self._cut = (offset + free_bytes, view[free_bytes:])
                view = view[:free_bytes]
            if view.nbytes:
                self._byte_ranges.append((offset, view))
                self._num_bytes += view.nbytes
        self._byte_ranges.sort(key=lambda byte_range: byte_range[0])

    @property
    def reach(self) -> BatchExtent | None:
        """Returns the part of the file that the batch covers; None if the batch is empty."""
        if not self._byte_ranges:
            return None
        offset, view = self._byte_ranges[-1]
        pieces, end = 0, -1
        for begin, data in self._byte_ranges:
            pieces += begin != end
            end = begin + data.nbytes
        return BatchExtent(
            begin=self._byte_ranges[0][0],
            end=offset + view.nbytes,
            num_pieces=pieces,
            num_bytes=self._num_bytes,
        )

    def take(self, *, until: int | None = None) -> list[ByteRange]:
        """Removes the bytes before file offset `until`, or all bytes if `until` is None, and returns them."""
        reach = self.reach
        if until is None or reach is None or reach.end <= until:
            taken, self._byte_ranges, self._num_bytes = self._byte_ranges, [], 0
            return taken
        taken, kept = [], []
        for offset, view in self._byte_ranges:
            count = until - offset
            if count >= view.nbytes:
                taken.append((offset, view))
            elif count <= 0:
                kept.append((offset, view))
            else:
                taken.append((offset, view[:count]))
                kept.append((offset + count, view[count:]))
        self._byte_ranges = kept
        self._num_bytes = sum(view.nbytes for _, view in kept)
        return taken


def paced(byte_ranges: Iterable[ByteRange], *, limit_bytes_per_s: float) -> Iterator[ByteRange]:
    """Yields the byte ranges, sleeping to keep the average rate at or below `limit_bytes_per_s`."""
    begin_s, num_bytes = time.monotonic(), 0
    for offset, view in byte_ranges:
        ahead_s = num_bytes / limit_bytes_per_s - (time.monotonic() - begin_s)
        if ahead_s > _SHORTEST_SLEEP_S:
            time.sleep(ahead_s)
        yield offset, view
        num_bytes += view.nbytes


def runs_of_neighbours(byte_ranges: Iterable[ByteRange]) -> Iterator[tuple[int, list[memoryview]]]:
    """Groups ascending byte ranges into contiguous runs. Yields the offset of each run and its views in order."""
    begin, end, views = 0, -1, list[memoryview]()
    for offset, view in byte_ranges:
        if offset != end and views:
            yield begin, views
            views = []
        if not views:
            begin = offset
        views.append(view)
        end = offset + view.nbytes
    if views:
        yield begin, views


def joined(byte_ranges: Iterable[ByteRange]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yields the given byte ranges, which must be ascending, but copies small contiguous ones into one.

    Each yielded byte range is a file offset and an array of uint8, shape (n,).
    """
    for begin, views in runs_of_neighbours(byte_ranges):
        offset, small, small_bytes = begin, list[memoryview](), 0
        for view in views:
            if view.nbytes < _JOIN_BELOW_BYTES:
                small.append(view)
                small_bytes += view.nbytes
                continue
            if small:
                yield offset, bytes_of(small)
                offset, small, small_bytes = offset + small_bytes, [], 0
            yield offset, np.frombuffer(view, dtype=np.uint8)
            offset += view.nbytes
        if small:
            yield offset, bytes_of(small)


def bytes_of(views: list[memoryview]) -> NDArray[np.uint8]:
    """Returns the concatenated views: uint8, shape (total bytes,). A single view is not copied."""
    if len(views) == 1:
        return np.frombuffer(views[0], dtype=np.uint8)
    return np.frombuffer(b"".join(views), dtype=np.uint8)
