"""Byte ranges to be written to a file: batches of bounded size, rate limiting, and joining of neighbours."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.engines.two_phase_plan import BatchExtent

# Offset in the file, and the bytes: one-dimensional, contiguous.
ByteRange: TypeAlias = tuple[int, memoryview]

# Smaller neighbours are joined, since a write costs as much as copying some tens of KiB.
_JOIN_BELOW_BYTES = 1 << 18
_SHORTEST_SLEEP_S = 0.01


@final
class WriteBatch:
    """Holds at most `max_bytes` bytes of `byte_ranges`, sorted by offset. The views must keep their bytes meanwhile."""

    def __init__(self, byte_ranges: Iterable[ByteRange], *, max_bytes: int) -> None:
        self._source = iter(byte_ranges)
        self.max_bytes = max_bytes
        self._cut: ByteRange | None = None  # the rest of a byte range that did not fit
        self._byte_ranges: list[ByteRange] = []
        self._num_bytes = 0

    def fill(self) -> None:
        """Takes byte ranges until the batch is full or the source is exhausted. Raises the errors of the source."""
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
        """Extent of the batch in the file; None if it is empty."""
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
        """Removes and returns the bytes before position `until` of the file; None: all bytes."""
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
    """Yields ascending byte ranges, with small neighbours copied into one: offset, and bytes as uint8, shape (n,)."""
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
    """Returns the views concatenated: uint8, shape (total bytes,). A single view is not copied."""
    if len(views) == 1:
        return np.frombuffer(views[0], dtype=np.uint8)
    return np.frombuffer(b"".join(views), dtype=np.uint8)
