"""Geometry that plans, writes and reads rest on, against numpy's own indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpctrain.checkpoint.format.boxes import (
    Box,
    Steps,
    TooFragmentedError,
    boxes_of_range,
    cover_exactly,
    intersection,
    runs_of,
    split_box,
)

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def shape_and_box(draw: st.DrawFn, *, min_size: int = 1) -> tuple[tuple[int, ...], Box]:
    shape = draw(shapes)
    offset = [draw(st.integers(0, n - min_size)) for n in shape]
    extent = [draw(st.integers(min_size, n - o)) for n, o in zip(shape, offset, strict=True)]
    return shape, Box(offset=tuple(offset), shape=tuple(extent))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


@given(shape_and_box())
def test_runs_are_the_box_in_row_major_order(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    runs = runs_of(box, shape=shape)
    found = [start + i for start in runs.starts.tolist() for i in range(runs.run_elems)]
    assert found == numbered(shape)[box.slices()].reshape(-1).tolist()


@given(shape_and_box())
def test_runs_are_as_long_as_they_can_be(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    runs = runs_of(box, shape=shape)
    ends = runs.starts + runs.run_elems
    assert not set(ends.tolist()) & set(runs.starts.tolist())


@given(shape_and_box(), st.integers(1, 30))
def test_pieces_of_a_split_box_follow_each_other_in_its_memory(
    case: tuple[tuple[int, ...], Box], max_elems: int
) -> None:
    shape, box = case
    pieces = list(split_box(box, max_elems=max_elems))
    content = [numbered(shape)[piece.slices()].reshape(-1) for piece in pieces]
    assert np.concatenate(content).tolist() == numbered(shape)[box.slices()].reshape(-1).tolist()
    assert all(piece.num_elems <= max_elems for piece in pieces)


@given(shapes, st.data())
def test_a_flat_range_is_the_same_elements_as_its_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    boxes = boxes_of_range(shape, start=start, stop=stop)
    found = [i for box in boxes for i in numbered(shape)[box.slices()].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shape_and_box(), st.data())
def test_intersection_is_what_both_boxes_hold(case: tuple[tuple[int, ...], Box], data: st.DataObject) -> None:
    shape, first = case
    offset = [data.draw(st.integers(0, n - 1)) for n in shape]
    extent = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)]
    second = Box(offset=tuple(offset), shape=tuple(extent))
    held = [set(np.ravel(numbered(shape)[box.slices()]).tolist()) for box in (first, second)]
    shared = intersection(first, second)
    found = set() if shared is None else set(np.ravel(numbered(shape)[shared.slices()]).tolist())
    assert found == held[0] & held[1]


@given(shapes, st.data())
def test_covering_agrees_with_counting_each_element(shape: tuple[int, ...], data: st.DataObject) -> None:
    # Cut the array at random, then sometimes spoil it: drop, repeat or move a box.
    boxes = [Box(offset=(0,) * len(shape), shape=shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = data.draw(st.sampled_from(dims))
        at = data.draw(st.integers(1, box.shape[dim] - 1))
        left, right = list(box.shape), list(box.shape)
        left[dim], right[dim] = at, box.shape[dim] - at
        moved = list(box.offset)
        moved[dim] += at
        boxes += [Box(offset=box.offset, shape=tuple(left)), Box(offset=tuple(moved), shape=tuple(right))]
    change = data.draw(st.sampled_from(["none", "drop", "repeat", "another"]))
    if change == "drop":
        boxes.pop()
    elif change == "repeat":
        boxes.append(boxes[0])
    elif change == "another":
        _, box = data.draw(shape_and_box().filter(lambda case: len(case[0]) == len(shape)))
        if box.lies_within(shape):
            boxes.append(box)
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[box.slices()] += 1
    boxes = data.draw(st.permutations(boxes))
    assert cover_exactly(boxes, shape=shape, steps=Steps()) == bool((counts == 1).all())


def test_a_covering_that_is_cut_too_finely_is_given_up() -> None:
    size = 200  # column i is cut below row i: between any two cuts all columns are met again
    upper = [Box(offset=(0, i), shape=(i + 1, 1)) for i in range(size)]
    lower = [Box(offset=(i + 1, i), shape=(size - i, 1)) for i in range(size)]
    assert cover_exactly([*upper, *lower], shape=(size + 1, size), steps=Steps())
    with pytest.raises(TooFragmentedError):
        cover_exactly([*upper, *lower], shape=(size + 1, size), steps=Steps(left=10_000))
