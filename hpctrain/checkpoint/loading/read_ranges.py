"""Runs of elements of a piece that are read at once, because the extents in them interleave in the file. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.metadata import StoredExtent, StoredPiece


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementRun:
    """Consecutive elements of a piece: those with numbers `start` to `start + num_elems - 1` in C order, and the
    extents that they contain. No extent lies partly in a run; a run with one extent has only its elements."""

    start: int
    num_elems: int
    extents: Sequence[StoredExtent]


def element_runs_of(piece: StoredPiece) -> Iterator[ElementRun]:
    """Yields the element runs of the piece in file order, cut at every position where no extent is cut."""
    if len(piece.extents) == 1:  # fast path for thousands of small tensors
        yield ElementRun(start=0, num_elems=piece.box.num_elems, extents=piece.extents)
        return
    strides = strides_of(piece.box.shape)
    placed = []
    for extent in piece.extents:
        first = last = 0
        for o, n, p, s in zip(extent.box.offset, extent.box.shape, piece.box.offset, strides, strict=True):
            first += (o - p) * s
            last += (o - p + n - 1) * s
        placed.append((first, last + 1, extent))
    placed.sort(key=lambda entry: entry[0])
    group: list[StoredExtent] = []
    begin = end = 0
    for first, stop, extent in placed:
        if group and first >= end:
            yield ElementRun(start=begin, num_elems=end - begin, extents=group)
            group = []
        if not group:
            begin, end = first, stop
        group.append(extent)
        end = max(end, stop)
    if group:
        yield ElementRun(start=begin, num_elems=end - begin, extents=group)


def flat_start(box: Box, *, shape: Sequence[int]) -> int | None:
    """Returns the position of the first element of `box` in the flattened array of `shape`; None if the box is not
    contiguous there. The box must not be empty.
    """
    inner_full = True
    start, stride = 0, 1
    for dim in range(len(shape) - 1, -1, -1):
        if box.shape[dim] > 1 and not inner_full:
            return None
        inner_full = inner_full and box.shape[dim] == shape[dim]
        start += box.offset[dim] * stride
        stride *= shape[dim]
    return start


def strides_of(shape: Sequence[int]) -> list[int]:
    """Returns the row-major strides of an array of `shape`, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides
