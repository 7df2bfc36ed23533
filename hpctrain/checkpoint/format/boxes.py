"""Boxes (hyperslabs) of a row-major array: splitting, contiguous runs, overlap, exact cover. Pure functions.

A box is a rectangular region of an array: an offset and a shape, one number per dimension, in elements. The part of a
tensor in a file, a rank's shard and the region that a reader requests are all boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A box of an array: the elements with offset[d] <= index[d] < offset[d] + shape[d] in every dimension d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elems(self) -> int:
        return math.prod(self.shape)

    def lies_within(self, shape: Sequence[int]) -> bool:
        """Returns True if the box lies inside an array of `shape` and has the same number of dimensions."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offset, self.shape, shape, strict=True)
        )

    def slices(self, *, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
        """Returns the slices that select the box in an array, or in a part of the array that begins at `origin`."""
        base = origin if origin is not None else (0,) * len(self.offset)
        return tuple(slice(o - b, o - b + s) for o, s, b in zip(self.offset, self.shape, base, strict=True))

    def __str__(self) -> str:
        if len(self.offset) != len(self.shape):  # an invalid box from the user, printed in an error
            return f"a box at {list(self.offset)} of shape {list(self.shape)}"
        spans = (f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=True))
        return f"[{', '.join(spans)}]"


def whole_box(shape: Sequence[int]) -> Box:
    return Box(offset=(0,) * len(shape), shape=tuple(shape))


def intersection(first: Box, second: Box) -> Box | None:
    """Returns the overlap of two boxes (rectangular regions) of the same array, or None if they share no element."""
    offset = tuple(map(max, first.offset, second.offset))
    shape = tuple(
        min(a + n, b + m) - o
        for a, n, b, m, o in zip(first.offset, first.shape, second.offset, second.shape, offset, strict=True)
    )
    return Box(offset=offset, shape=shape) if all(n > 0 for n in shape) else None


def split_box(box: Box, *, max_elems: int) -> Iterator[Box]:
    """Yields boxes of at most `max_elems` elements that together make up `box`, in row-major order.

    In a dense row-major copy of `box`, each yielded box is contiguous and begins where the previous one ends.
    """
    num_elems = box.num_elems
    if num_elems <= max_elems:
        if num_elems:
            yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    inner_elems = num_elems // box.shape[dim]
    rows = max(1, max_elems // inner_elems)
    for row in range(0, box.shape[dim], rows):
        count = min(rows, box.shape[dim] - row)
        piece = Box(
            offset=(*box.offset[:dim], box.offset[dim] + row, *box.offset[dim + 1 :]),
            shape=(*box.shape[:dim], count, *box.shape[dim + 1 :]),
        )
        yield from split_box(piece, max_elems=max_elems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The contiguous runs of elements that make up a box (rectangular region) of an array, in row-major order.

    All runs have the same length.
    """

    starts: NDArray[Any]  # (num_runs,) int64: first element of each run, counted in the flattened array
    run_elems: int


def runs_of(box: Box, *, shape: Sequence[int]) -> Runs:
    """Returns the longest possible contiguous runs that make up the rectangular region `box` of an array of `shape`.

    The box must not be empty.
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    outer = len(shape)
    run_elems = 1
    while outer > 0:  # from the last dimension inwards, as long as all later dimensions are covered in full
        outer -= 1
        run_elems *= box.shape[outer]
        if box.shape[outer] != shape[outer]:
            break
    starts = np.array([sum(o * s for o, s in zip(box.offset, strides, strict=True))], dtype=np.int64)
    for dim in range(outer):
        steps = np.arange(box.shape[dim], dtype=np.int64) * strides[dim]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return Runs(starts=starts, run_elems=run_elems)


def boxes_of_range(shape: Sequence[int], *, start: int, stop: int) -> list[Box]:
    """Returns boxes, in order, that make up the elements start <= i < stop of the flattened array of `shape`.

    There are at most 2 * len(shape) - 1 boxes; each is contiguous in the array.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box(offset=(), shape=())]
    inner_elems = math.prod(shape[1:])
    first, last = start // inner_elems, (stop - 1) // inner_elems

    def row(index: int, begin: int, end: int) -> list[Box]:
        inner = boxes_of_range(shape[1:], start=begin, stop=end)
        return [Box(offset=(index, *b.offset), shape=(1, *b.shape)) for b in inner]

    if first == last and stop - start < inner_elems:
        return row(first, start - first * inner_elems, stop - first * inner_elems)
    boxes: list[Box] = []
    if start % inner_elems:
        boxes += row(first, start % inner_elems, inner_elems)
        first += 1
    tail = row(last, 0, stop % inner_elems) if stop % inner_elems else []
    num_rows = last - first + (0 if tail else 1)
    if num_rows > 0:
        offset = (first, *(0 for _ in shape[1:]))
        boxes.append(Box(offset=offset, shape=(num_rows, *shape[1:])))
    return boxes + tail


class TooFragmentedError(ValueError):
    """Raised if there are so many small boxes (rectangular regions) that checking them would take too long."""


@dataclass(slots=True, kw_only=True)
class Steps:
    """Limit on the work of a check such as `cover_exactly`, counted in steps; about 2 million steps take one second.

    Checking a terabyte that is divided into boxes of 4 MiB takes half a million steps.
    """

    left: int = 3_000_000

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise TooFragmentedError("the tensor is cut into too many small boxes to be checked")


def cover_exactly(boxes: Sequence[Box], *, shape: Sequence[int], steps: Steps) -> bool:
    """Returns True if the boxes (rectangular regions) hold every element of an array of `shape` exactly once.

    The boxes must not be empty and must lie within the array. The algorithm sweeps over one dimension: between two
    neighbouring box boundaries the set of boxes is constant, and must cover the remaining dimensions (recursively).
    Raises TooFragmentedError when `steps` is used up, which bounds the time that a malicious file can take.
    """
    if math.prod(shape) == 0:
        return not boxes

    def covers(part: list[Box], dim: int) -> bool:
        if dim == len(shape) or len(part) <= 1:
            return (
                len(part) == 1
                and part[0].offset[dim:] == (0,) * (len(shape) - dim)
                and (part[0].shape[dim:] == tuple(shape[dim:]))
            )
        part.sort(key=lambda box: box.offset[dim])
        position, taken = 0, 0
        active: list[Box] = []
        while position < shape[dim]:
            active = [box for box in active if box.offset[dim] + box.shape[dim] > position]
            while taken < len(part) and part[taken].offset[dim] == position:
                active.append(part[taken])
                taken += 1
            steps.take(len(active) + 1)
            end = min((box.offset[dim] + box.shape[dim] for box in active), default=position)
            if taken < len(part):
                end = min(end, part[taken].offset[dim])
            if end <= position:  # nothing begins or continues here, or a box begins before `position`
                return False
            if not covers(list(active), dim + 1):
                return False
            position = end
        return taken == len(part)

    return covers(list(boxes), 0)
