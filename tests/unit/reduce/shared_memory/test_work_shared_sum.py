"""Sums in shared memory, piece by piece, by whichever rank has time: the same bits, whoever sums."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpctrain.comm.backends.threads_world import ThreadsWorld, run_threads
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, milestones, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import result_of
from hpctrain.reduce.shared_memory import all_reduce_reducer as engine_module, summation as add_module
from hpctrain.reduce.shared_memory.all_reduce_reducer import PIECE_ELEMS, AllReduceReducer
from hpctrain.reduce.shared_memory.summation import COMPILED
from tests.uneven_ranks import fill_and_sum
from tests.unit.reduce.shared_memory.transport_cases import CPU, engine, topology_of, values_of

compiled = pytest.mark.skipif(COMPILED is None, reason="hpctrain was installed without a compiler")
SIZES = [0, 1, 1000, PIECE_ELEMS, PIECE_ELEMS + 1, 3 * PIECE_ELEMS, 7 * PIECE_ELEMS + 5]


def within(world: ThreadsWorld) -> AllReduceReducer:
    reducer = engine(world, topology_of((world.num_ranks,)), algorithm=Algorithm.HIERARCHICAL)
    reducer.keep_squares()
    return reducer


@pytest.fixture(params=[pytest.param(True, marks=compiled), False], ids=["compiled", "not compiled"])
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all ranks have the compiled sums."""
    if not request.param:
        monkeypatch.setattr(engine_module, "COMPILED", None)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_at_their_own_speeds_get_the_sum_in_the_order_of_the_ranks(num_ranks: int, dtype: Any) -> None:
    buckets = [Bucket(dtype, (), size) for size in SIZES]
    num_rounds = 8

    def values(rank: int, step: int) -> list[torch.Tensor]:
        return [values_of(rank, size, dtype=dtype, seed=100 * step + size) for size in SIZES]

    def rank_main(world: ThreadsWorld) -> list[list[torch.Tensor]]:
        reducer = within(world)
        buffers = reducer.plan(buckets, device=CPU)
        pace = random.Random(world.rank)
        found = []
        for step in range(num_rounds):
            fill_and_sum(reducer, values=values(world.rank, step), buffers=buffers, pace=pace)
            found.append([buffer.clone() for buffer in buffers])
        reducer.close()
        return found

    results = run_threads(num_ranks, rank_main)
    for step in range(num_rounds):
        expected = values(0, step)
        for rank in range(1, num_ranks):
            expected = [a + b for a, b in zip(expected, values(rank, step), strict=True)]
        for result in results:
            assert all(map(torch.equal, result[step], expected))


@pytest.mark.usefixtures("everywhere")
def test_squares_are_the_same_bits_from_run_to_run_and_on_all_ranks() -> None:
    """Whoever summed which piece."""
    buckets = plan_buckets(
        [GradientSpec(size, torch.float32) for size in (5 * PIECE_ELEMS, 100)], bucket_bytes=1 << 20
    )

    def rank_main(world: ThreadsWorld) -> list[float]:
        reducer = within(world)
        buffers = reducer.plan(buckets, device=CPU)
        values = [values_of(world.rank, buffer.numel(), dtype=torch.float32, seed=7) for buffer in buffers]
        found = []
        for number in range(20):
            pace = random.Random(world.rank * 100 + number)
            fill_and_sum(reducer, values=values, buffers=buffers, pace=pace)
            found.append(result_of(reducer.finish(np.empty(0), comm=world)).norm_square)
        reducer.close()
        return found

    results = run_threads(3, rank_main)
    assert {square for result in results for square in result} == {results[0][0]}
    assert results[0][0] > 0


@compiled
def test_the_last_rank_finds_summed_what_it_has_filled_before() -> None:
    """The others do not wait for the whole bucket."""
    numel = 4 * PIECE_ELEMS

    def rank_main(world: ThreadsWorld) -> bool:
        reducer = within(world)
        (buffer,) = reducer.plan([Bucket(torch.float32, (), numel)], device=CPU)
        buffer.fill_(1.0)
        summed_early = True
        if world.rank == 0:
            reducer.filled(0, 3 * PIECE_ELEMS)
            deadline = time.monotonic() + 300
            while buffer[3 * PIECE_ELEMS - 1] != 2.0 and time.monotonic() < deadline:
                time.sleep(0.001)
            summed_early = buffer[: 3 * PIECE_ELEMS].eq(2.0).all().item() is True
            summed_early &= buffer[3 * PIECE_ELEMS :].eq(1.0).all().item() is True
        for progressed in reducer.reduce(0):
            if not progressed:
                time.sleep(0.001)
        reducer.close()
        return summed_early and buffer.eq(2.0).all().item() is True

    assert all(run_threads(2, rank_main))


@compiled
def test_ranks_of_a_node_may_differ_in_what_was_installed_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    vote = engine_module.is_true_everywhere
    num_votes: Counter[int] = Counter()

    def vote_as_if_rank_1_had_no_compiler(comm: Any, value: bool) -> bool:
        num_votes[comm.rank] += 1  # the first vote is the one on the compiled function
        return vote(comm, value and (comm.rank != 1 or num_votes[1] > 1))

    monkeypatch.setattr(engine_module, "is_true_everywhere", vote_as_if_rank_1_had_no_compiler)
    size = 5 * PIECE_ELEMS + 3

    def rank_main(world: ThreadsWorld) -> torch.Tensor:
        reducer = within(world)
        buffers = reducer.plan([Bucket(torch.float32, (), size)], device=CPU)
        for _ in range(3):
            values = [values_of(world.rank, size, dtype=torch.float32, seed=1)]
            fill_and_sum(reducer, values=values, buffers=buffers, pace=random.Random(world.rank))
        found = buffers[0].clone()
        reducer.close()
        return found

    results = run_threads(3, rank_main)
    parts = [values_of(rank, size, dtype=torch.float32, seed=1) for rank in range(3)]
    assert all(torch.equal(result, parts[0] + parts[1] + parts[2]) for result in results)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=60), least=st.integers(1, 10**5))
def test_milestones_are_few_and_leave_little(sizes: list[int], least: int) -> None:
    small = plan_buckets([GradientSpec(size, torch.float32) for size in (3, 5)], bucket_bytes=10**9)
    (bucket,) = plan_buckets([GradientSpec(size, torch.float32) for size in sizes], bucket_bytes=10**9)
    found = milestones([*small, bucket], least_elems=least)
    said = 0
    for parameter, milestone in found.items():
        assert milestone.bucket == 1
        assert milestone.parameters[-1] == parameter
        assert milestone.num_elems == sum(sizes[index] for index in milestone.parameters)
        assert milestone.num_elems - said >= max(least, (bucket.num_gradients - said) / 2)
        said = milestone.num_elems
    assert len(found) <= np.log2(bucket.num_gradients) + 1
    # What comes after the last: less than twice the last gradients, or than the least.
    left = bucket.num_gradients - said
    without_last = left - sizes[bucket.slots[-1].parameter]
    assert without_last < max(least, left / 2)


def test_milestones_are_of_the_last_bucket_of_each_dtype() -> None:
    dtypes = [torch.float64, *[torch.float32] * 5, torch.float64]
    buckets = plan_buckets([GradientSpec(100, dtype) for dtype in dtypes], bucket_bytes=1200)
    assert [(bucket.dtype, len(bucket.slots)) for bucket in buckets] == [
        (torch.float32, 3), (torch.float64, 1), (torch.float64, 1), (torch.float32, 2)
    ]  # fmt: skip
    (milestone,) = milestones(buckets, least_elems=1).values()
    assert (milestone.bucket, milestone.num_elems) == (3, 100)


@compiled
def test_a_compiled_file_of_an_earlier_version_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain.reduce.shared_memory import _add

    assert add_module._compiled() is not None
    monkeypatch.setattr(_add, "VERSION", add_module.VERSION - 1)
    assert add_module._compiled() is None
    monkeypatch.delattr(_add, "VERSION")
    assert add_module._compiled() is None


@compiled
@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("parts", (np.zeros(4, np.float32), np.zeros(5, np.float32))),
        ("parts", (np.zeros(4, np.int32), np.zeros(4, np.int32))),
        ("parts", ()),
        ("flags", (np.zeros(16, np.int64),)),
        ("flags", (np.zeros(15, np.int64), np.zeros(16, np.int64))),
        ("flags", (np.zeros(16), np.zeros(16))),
        ("claimed", np.zeros(1)),
        ("claimed", np.zeros(0, np.int64)),
        ("squares", np.zeros(1)),
        ("squares", np.zeros(2, np.int64)),
        ("local", 2),
        ("local", -1),
        ("before", -1),
        ("piece_elems", 0),
    ],
)
def test_what_the_compiled_sum_is_not_made_for_is_refused(changed: str, value: Any) -> None:
    from hpctrain.reduce.shared_memory._add import take

    arguments: dict[str, Any] = {
        "parts": (np.zeros(4, np.float32), np.zeros(4, np.float32)),
        "flags": (np.zeros(16, np.int64), np.zeros(16, np.int64)),
        "claimed": np.zeros(1, np.int64),
        "squares": np.zeros(2),
        "local": 0,
        "before": 0,
        "piece_elems": 2,
        "num_squared": 4,
        "factor": 1.0,
    }
    assert take(*arguments.values()) == 0
    with pytest.raises(ValueError):
        take(*{**arguments, changed: value}.values())


@compiled
@pytest.mark.parametrize("flags", [np.zeros(15, np.int64), np.zeros(16), np.zeros((1, 16), np.int64)])
def test_only_flags_are_filled(flags: Any) -> None:
    from hpctrain.reduce.shared_memory._add import fill

    with pytest.raises(ValueError):
        fill(flags, 1)
    assert not flags.any()
