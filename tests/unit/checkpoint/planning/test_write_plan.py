"""The write plan: every byte once, evenly shared, and refused when the ranks' states do not fit together."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpctrain.checkpoint.format.boxes import Box, runs_of
from hpctrain.checkpoint.format.state import Header
from hpctrain.checkpoint.planning.write_plan import (
    CUT_BYTES,
    EXTENT_BYTES,
    EvenShards,
    Extent,
    Files,
    WritePlan,
    explain_difference,
    make_plan,
)
from hpctrain.errors import CheckpointError

dtypes = st.sampled_from(["uint8", "bfloat16", "float32", "complex128", "bool"])


def replicated(name: str, *shape: int, dtype: str = "float32") -> Header:
    return Header(name=name, dtype=dtype, shape=shape, box=None)


def shard(name: str, shape: tuple[int, ...], box: Box, dtype: str = "float32") -> Header:
    return Header(name=name, dtype=dtype, shape=shape, box=box)


def rows(name: str, shape: tuple[int, ...], num_ranks: int, dtype: str = "float32") -> list[list[Header]]:
    cuts = [rank * shape[0] // num_ranks for rank in range(num_ranks + 1)]
    boxes = [Box(offset=(a, *(0 for _ in shape[1:])), shape=(b - a, *shape[1:])) for a, b in pairwise(cuts)]
    return [[shard(name, shape, box, dtype)] for box in boxes]


def all_extents(plan: WritePlan) -> list[list[Extent]]:
    return [plan.extents_of(rank) for rank in range(plan.num_ranks)]


def times_written(plan: WritePlan) -> list[np.ndarray]:
    """How often each element of each tensor is written."""
    counts = [np.zeros(math.prod(tensor.shape), dtype=int) for tensor in plan.tensors]
    for extents in all_extents(plan):
        for extent in extents:
            runs = runs_of(extent.box, shape=plan.tensors[extent.tensor].view)
            for start in runs.starts.tolist():
                counts[extent.tensor][start : start + runs.run_elems] += 1
    return counts


sizes = st.one_of(st.integers(0, 40), st.integers(0, 9000))


@given(
    st.lists(st.tuples(sizes, st.integers(1, 3), dtypes), max_size=12),
    st.integers(1, 9),
    st.integers(0, 50),
    st.integers(1, 5),
)
def test_every_element_is_written_exactly_once(
    tensors: list[tuple[int, int, str]], num_ranks: int, shard_rows: int, columns: int
) -> None:
    headers = sorted(
        (replicated(f"t{i}", n, m, dtype=dtype) for i, (n, m, dtype) in enumerate(tensors)),
        key=lambda header: header.name,
    )
    plan = make_plan(replicated=headers, shards_by_rank=rows("sharded", (shard_rows, columns, 2), num_ranks))
    assert [tensor.name for tensor in plan.tensors] == sorted(tensor.name for tensor in plan.tensors)
    for counts in times_written(plan):
        assert (counts == 1).all()


@given(st.lists(st.tuples(sizes, dtypes), min_size=1, max_size=40), st.integers(1, 16))
def test_replicated_bytes_are_shared_evenly(tensors: list[tuple[int, str]], num_ranks: int) -> None:
    headers = [replicated(f"t{i:03}", n, dtype=dtype) for i, (n, dtype) in enumerate(tensors)]
    plan = make_plan(replicated=headers, shards_by_rank=[[]] * num_ranks)
    total_bytes = sum(tensor.num_bytes for tensor in plan.tensors)
    written = [plan.bytes_of(rank) for rank in range(num_ranks)]
    assert sum(written) == total_bytes
    assert all(abs(share - total_bytes / num_ranks) <= CUT_BYTES for share in written)


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_rank_0_writes_its_own_tensors_and_that_much_less_of_the_replicated_ones(
    tensors: list[tuple[int, bool]], num_ranks: int, files: int
) -> None:
    headers = [
        Header(name=f"t{i:03}", dtype="float32", shape=(n,), box=None, from_rank_0=own)
        for i, (n, own) in enumerate(tensors)
    ]
    file_of_rank = [rank * min(files, num_ranks) // num_ranks for rank in range(num_ranks)]
    plan = make_plan(replicated=headers, shards_by_rank=[[]] * num_ranks, file_of_rank=file_of_rank)
    for counts in times_written(plan):
        assert (counts == 1).all()
    for rank, extents in enumerate(all_extents(plan)):
        for extent in extents:
            assert plan.tensors[extent.tensor].name == headers[extent.source].name
            assert rank == 0 or not headers[extent.source].from_rank_0
    own_bytes = sum(4 * n for n, own in tensors if own)
    even_bytes = sum(4 * n for n, _ in tensors) / num_ranks
    written = [plan.bytes_of(rank) for rank in range(num_ranks)]
    if own_bytes <= even_bytes:
        assert all(abs(share - even_bytes) <= CUT_BYTES for share in written)
    else:
        assert written[0] == own_bytes


def test_large_tensors_are_cut_into_extents_at_whole_pages() -> None:
    headers = [replicated("a", 3_000_000), replicated("b", 700, 4001)]
    plan = make_plan(replicated=headers, shards_by_rank=[[]] * 3)
    for extents in all_extents(plan):
        for extent in extents:
            assert extent.box.num_elems * 4 <= EXTENT_BYTES
            assert extent.box.offset[0] * 4 % CUT_BYTES == 0
    assert len(plan.extents_of(0)) >= 2


def test_extents_of_a_shard_follow_each_other_in_its_memory() -> None:
    plan = make_plan(replicated=[], shards_by_rank=rows("w", (4099, 1024), 3))
    for rank, extents in enumerate(all_extents(plan)):
        position = 0
        for extent in extents:
            assert extent.source_start == position
            assert extent.box.num_elems * 4 <= EXTENT_BYTES
            position += extent.box.num_elems
        assert position == 1024 * ((rank + 1) * 4099 // 3 - rank * 4099 // 3)


def test_tensors_larger_than_two_billion_elements_are_planned() -> None:
    plan = make_plan(replicated=[replicated("w", 3 * 2**31, dtype="uint8")], shards_by_rank=[[]] * 4)
    ends = [extents[-1].box for extents in all_extents(plan)]
    assert ends[-1].offset[0] + ends[-1].shape[0] == 3 * 2**31
    assert {plan.bytes_of(rank) for rank in range(4)} == {3 * 2**29}


@pytest.mark.parametrize(
    ("boxes", "shape"),
    [
        ([((0, 0), (2, 3)), ((1, 0), (3, 3))], (4, 3)),  # overlap
        ([((0, 0), (2, 3)), ((3, 0), (1, 3))], (4, 3)),  # gap
        ([((0, 0), (4, 2))], (4, 3)),  # end missing
        ([((0, 0), (4, 3)), ((0, 0), (4, 3))], (4, 3)),  # twice
    ],
)
def test_shards_that_do_not_make_up_their_tensor_are_refused(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]
) -> None:
    shards = [[shard("w", shape, Box(offset=o, shape=s))] for o, s in boxes]
    with pytest.raises(
        CheckpointError, match=r"shards of 'w', \[4, 3\], do not hold every element"
    ) as caught:
        make_plan(replicated=[], shards_by_rank=shards)
    assert caught.value.agreed


def test_shards_of_one_name_with_different_shapes_are_named_with_their_ranks() -> None:
    one = shard("w", (2, 2), Box(offset=(0, 0), shape=(1, 2)))
    other = shard("w", (2, 3), Box(offset=(1, 0), shape=(1, 3)))
    with pytest.raises(CheckpointError, match=r"'w' disagree.*\[2, 2\] on rank 0.*\[2, 3\] on rank 2"):
        make_plan(replicated=[], shards_by_rank=[[one], [], [other]])


def test_a_name_used_twice_is_refused() -> None:
    with pytest.raises(CheckpointError, match="more than one replicated tensor is called 'w'"):
        make_plan(replicated=[replicated("w", 1), replicated("w", 1)], shards_by_rank=[[]])
    with pytest.raises(CheckpointError, match="'w' is sharded on rank 0 and also replicated"):
        make_plan(replicated=[replicated("w", 4)], shards_by_rank=rows("w", (4,), 1))


def test_differences_between_ranks_are_named() -> None:
    text = explain_difference(
        [
            [replicated("a", 2), replicated("b", 3)],
            [replicated("a", 2)],
            [replicated("a", 5, dtype="float64"), replicated("b", 3)],
        ]
    )
    assert "'a': replicated float32 [2] on rank 0, 1, replicated float64 [5] on rank 2" in text
    assert "'b': replicated float32 [3] on rank 0, 2, missing on rank 1" in text


def test_each_file_is_made_by_the_lowest_rank_that_writes_to_it() -> None:
    files = Files(of_rank=(0, 1, 0, 2, 1))
    assert files.count == 3
    assert files.leaders == (0, 1, 3)


@given(
    st.lists(st.tuples(sizes, dtypes, st.booleans()), max_size=8),
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.integers(1, 3),
)
def test_pieces_hold_their_extents_and_each_file_lists_its_own(
    tensors: list[tuple[int, str, bool]], files: list[int], num_rows: int
) -> None:
    present = sorted(set(files))
    file_of_rank = [present.index(file) for file in files]
    num_ranks = len(files)
    headers = [
        Header(name=f"t{i:03}", dtype=dtype, shape=(n,), box=None, from_rank_0=own)
        for i, (n, dtype, own) in enumerate(tensors)
    ]
    listed = rows("even", (num_rows * num_ranks, 3), num_ranks)
    even = EvenShards.of(listed[-1], rank=num_ranks - 1, num_ranks=num_ranks)
    assert even is not None
    assert [list(shards) for shards in even] == listed
    plan = make_plan(replicated=headers, shards_by_rank=even, file_of_rank=file_of_rank)
    same = make_plan(replicated=headers, shards_by_rank=listed, file_of_rank=file_of_rank)
    assert all_extents(plan) == all_extents(same)
    pieces = plan.pieces()
    assert pieces == same.pieces()
    for counts in times_written(plan):
        assert (counts == 1).all()
    for rank, extents in enumerate(all_extents(plan)):
        own = plan.pieces_in(file_of_rank[rank])
        assert list(own) == sorted(own)
        for extent in extents:
            piece = own[extent.tensor, extent.piece]
            assert piece == pieces[extent.tensor][extent.piece]
            assert piece.file == file_of_rank[rank]
            begin = [e - p for e, p in zip(extent.box.offset, piece.box.offset, strict=True)]
            assert Box(offset=tuple(begin), shape=extent.box.shape).lies_within(piece.box.shape)
    for file in range(len(present)):
        datasets = [piece.dataset for piece in plan.pieces_in(file).values()]
        assert len(set(datasets)) == len(datasets)


@pytest.mark.parametrize(
    "box",
    [
        Box(offset=(2, 0), shape=(2, 3)),  # rank 1's rows of 3 ranks, but not of all columns
        Box(offset=(1, 0), shape=(2, 4)),
        Box(offset=(2, 0), shape=(3, 4)),
        Box(offset=(0, 0), shape=(0, 4)),
    ],
)
def test_shards_that_are_not_even_are_not_taken_for_even(box: Box) -> None:
    assert (
        EvenShards.of([shard("w", (6, 4), Box(offset=(2, 0), shape=(2, 4)))], rank=1, num_ranks=3) is not None
    )
    assert EvenShards.of([shard("w", (6, 4), box)], rank=1, num_ranks=3) is None
    two = [shard("w", (6, 4), Box(offset=(2, 0), shape=(2, 4)))] * 2
    assert EvenShards.of(two, rank=1, num_ranks=3) is None
