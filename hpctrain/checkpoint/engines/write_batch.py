"""Stretches on their way to a file: a bounded batch of them, and runs of neighbours."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.engines.two_phase_plan import BatchExtent

# Where bytes go in the file, and the bytes: one-dimensional, contiguous.
ByteRange: TypeAlias = tuple[int, memoryview]

# Smaller neighbours are joined: a write costs as much as copying some tens of KiB.
_JOIN_BELOW_BYTES = 1 << 18
_SHORTEST_SLEEP_S = 0.01


@final
class WriteBatch:
    """At most `max_bytes` of what `stretches` gives, ascending. The views that it takes must keep their bytes."""

    def __init__(self, stretches: Iterable[ByteRange], *, max_bytes: int) -> None:
        self._source = iter(stretches)
        self.max_bytes = max_bytes
        self._cut: ByteRange | None = None  # the rest of a stretch that did not fit
        self._stretches: list[ByteRange] = []
        self._num_bytes = 0

    def fill(self) -> None:
        """Take stretches until the batch is full or there are no more. Raises what the source raises."""
        while self._num_bytes < self.max_bytes:
            item = self._cut or next(self._source, None)
            self._cut = None
            if item is None:
                break
            offset, view = item
            room = self.max_bytes - self._num_bytes
            if view.nbytes > room:
                self._cut = (offset + room, view[room:])
                view = view[:room]
            if view.nbytes:
                self._stretches.append((offset, view))
                self._num_bytes += view.nbytes
        self._stretches.sort(key=lambda stretch: stretch[0])

    @property
    def reach(self) -> BatchExtent | None:
        """None when the batch is empty."""
        if not self._stretches:
            return None
        offset, view = self._stretches[-1]
        pieces, end = 0, -1
        for begin, data in self._stretches:
            pieces += begin != end
            end = begin + data.nbytes
        return BatchExtent(
            begin=self._stretches[0][0],
            end=offset + view.nbytes,
            num_pieces=pieces,
            num_bytes=self._num_bytes,
        )

    def take(self, *, until: int | None = None) -> list[ByteRange]:
        """Take out what lies before byte `until`; None: everything."""
        reach = self.reach
        if until is None or reach is None or reach.end <= until:
            taken, self._stretches, self._num_bytes = self._stretches, [], 0
            return taken
        taken, kept = [], []
        for offset, view in self._stretches:
            count = until - offset
            if count >= view.nbytes:
                taken.append((offset, view))
            elif count <= 0:
                kept.append((offset, view))
            else:
                taken.append((offset, view[:count]))
                kept.append((offset + count, view[count:]))
        self._stretches = kept
        self._num_bytes = sum(view.nbytes for _, view in kept)
        return taken


def paced(stretches: Iterable[ByteRange], *, limit_bytes_per_s: float) -> Iterator[ByteRange]:
    """The stretches, no faster than that many bytes a second on the whole."""
    begin_s, num_bytes = time.monotonic(), 0
    for offset, view in stretches:
        ahead_s = num_bytes / limit_bytes_per_s - (time.monotonic() - begin_s)
        if ahead_s > _SHORTEST_SLEEP_S:
            time.sleep(ahead_s)
        yield offset, view
        num_bytes += view.nbytes


def runs_of_neighbours(stretches: Iterable[ByteRange]) -> Iterator[tuple[int, list[memoryview]]]:
    """Ascending stretches, grouped where each begins at the end of the one before: where a run begins, and its
    views in order."""
    begin, end, views = 0, -1, list[memoryview]()
    for offset, view in stretches:
        if offset != end and views:
            yield begin, views
            views = []
        if not views:
            begin = offset
        views.append(view)
        end = offset + view.nbytes
    if views:
        yield begin, views


def joined(stretches: Iterable[ByteRange]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Ascending stretches with small neighbours copied into one piece: where it begins, and its bytes."""
    for begin, views in runs_of_neighbours(stretches):
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
    """The views one after the other, shape (total bytes,)."""
    if len(views) == 1:
        return np.frombuffer(views[0], dtype=np.uint8)
    return np.frombuffer(b"".join(views), dtype=np.uint8)
