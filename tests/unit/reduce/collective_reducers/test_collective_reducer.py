"""Buckets summed by a backend's collective operations, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.reduce.collective_reducers.collective_reducer import CastSum, CollectiveReducer, split_bucket
from tests import reducer_cases
from tests.reducer_cases import (
    ALGORITHMS,
    CPU,
    LAYOUTS,
    buckets_for,
    gradients,
    make,
    reduce_all,
    step,
)

LAYOUTS_OF_ALL = [names for layouts in LAYOUTS.values() for names in layouts]


@pytest.mark.parametrize(("algorithm", "wire"), ALGORITHMS)
@pytest.mark.parametrize("names", LAYOUTS_OF_ALL)
def test_sums_stay_within_the_wires_bound(names: str, algorithm: str, wire: str) -> None:
    run_threads(len(names), lambda world: reducer_cases.sums_are_within_bounds(world, names, algorithm, wire))


def test_a_bucket_is_cut_into_pieces_with_an_owner_for_each_element() -> None:
    for numel in (0, 1, 2, 9, 10, 11, 25):
        for num_ranks in (1, 3, 4):
            pieces = split_bucket(numel, num_ranks=num_ranks, piece_elems=10)
            covered = [e for p in pieces for r in range(num_ranks) for e in range(*p.offsets[r : r + 2])]
            assert covered == list(range(numel))
            assert all(p.offsets[-1] - p.offsets[0] <= 10 for p in pieces)


def test_a_rank_that_plans_another_bucket_is_reported_on_every_rank() -> None:
    texts = run_threads(3, reducer_cases.another_plan_is_reported_to_all)
    assert len(set(texts)) == 1
    assert "but rank 2" in texts[0]


@pytest.mark.parametrize(
    ("names", "algorithm", "wire", "expected"),
    [
        # 1024 elements and nothing else that leaves the node, in bytes per rank.
        ("aabb", "flat", "fp32", [0, 6144, 0, 6144]),  # 2 * 3/4 * 4096 to the next rank
        ("aabb", "flat", "fp16", [2048] * 4),  # slices and sums of 512 bytes, to each of two ranks elsewhere
        ("aab", "flat", "fp16", [1365, 1365, 2731]),
        ("aabb", "hierarchical-flat", "fp16", [1024] * 4),  # a half of 2048, once up and once down
        ("abc", "hierarchical-flat", "fp32", [5461, 5461, 5461]),
        ("aaaa", "hierarchical-flat", "fp32", [0] * 4),
        ("aabb", "direct", "fp16", [1024, 1024 + 1536, 1024, 1024 + 1536]),
        ("aaaa", "direct", "int8", [0] * 4),
    ],
)
def test_bytes_to_other_nodes_are_counted(names: str, algorithm: str, wire: str, expected: list[int]) -> None:
    def case(world: World) -> int:
        reducer = make(world, names=names, algorithm=algorithm, wire=wire)
        bucket = reducer_cases.Bucket(torch.float32, (), 1024)
        # One piece, so that the sums are easy to follow.
        reducer._sums._piece_elems = 10_000  # type: ignore[attr-defined]
        reducer.plan([bucket], device=CPU)
        list(reducer.reduce(0))
        return reducer.bytes_sent()

    found = run_threads(len(names), case)
    assert found == pytest.approx(expected, abs=2)


def test_what_is_fed_back_makes_the_sums_of_many_steps_right() -> None:
    """The error of the sum over steps does not grow with their number: it is that of the last step alone."""

    def case(world: World, feedback: bool) -> float:
        reducer = make(world, names="aab", algorithm="direct", wire="int8", feedback=feedback)
        memory = reducer.plan(buckets_for(), device=CPU)
        errors = [torch.zeros(b.numel, dtype=torch.float64) for b in buckets_for()]
        for _ in range(40):
            step(reducer, memory, world, seed=0)  # the same gradients: rounding is the same without feedback
            reducer.end_step(applied=True, rescale=1.0)
            for error, bucket, values in zip(errors, buckets_for(), memory, strict=True):
                error += values.double() - sum(gradients(rank, bucket).double() for rank in range(3))
        return max(
            float(error[slot.offset : slot.offset + slot.numel].abs().max())
            for error, bucket in zip(errors, buckets_for(), strict=True)
            for slot in bucket.slots
            if slot.numel
        )

    with_feedback = run_threads(3, lambda world: case(world, True))
    without = run_threads(3, lambda world: case(world, False))
    # Largest magnitudes are near 4 per rank and 8 for the sum: 4 * 4/253 + 8/253 at most.
    assert with_feedback[0] < 0.15
    assert without[0] > 1.0


def test_a_skipped_step_leaves_what_was_fed_back_as_it_was() -> None:
    def case(world: World) -> bool:
        reducer = make(world, names="ab", algorithm="direct", wire="int8", feedback=True)
        memory = reducer.plan(buckets_for(), device=CPU)
        step(reducer, memory, world, seed=0)
        reducer.end_step(applied=True, rescale=1.0)
        before = reducer.state()[0].tensor.clone()
        for values in memory:
            values.fill_(float("inf"))
        reduce_all(reducer, memory)
        assert not memory[0].isfinite().all()
        reducer.end_step(applied=False, rescale=0.5)
        assert float(before.abs().max()) > 0
        return torch.equal(reducer.state()[0].tensor, before * 0.5)

    assert run_threads(2, case) == [True, True]


def _whole_state(world: World, reducer: CollectiveReducer) -> dict[str, torch.Tensor]:
    """The state of all ranks put together, as a checkpoint does."""
    (mine,) = reducer.state()
    rows = world.all_gather(mine.tensor.reshape(-1), counts=[mine.tensor.numel()] * world.num_ranks)
    return {mine.name: rows.view(mine.global_shape)}


def test_restored_on_as_many_ranks_the_next_step_gives_the_same_bits() -> None:
    def case(world: World) -> None:
        first = make(world, names="aab", algorithm="direct", wire="int8", feedback=True)
        memory = first.plan(buckets_for(), device=CPU)
        step(first, memory, world, seed=0)
        first.end_step(applied=True, rescale=1.0)
        saved = {name: tensor.clone() for name, tensor in _whole_state(world, first).items()}
        step(first, memory, world, seed=1)
        second = make(world, names="aab", algorithm="direct", wire="int8", feedback=True)
        again = second.plan(buckets_for(), device=CPU)
        second.load_state(saved)
        step(second, again, world, seed=1)
        assert all(torch.equal(a, b) for a, b in zip(memory, again, strict=True))

    run_threads(3, case)


def test_restored_on_other_ranks_nothing_of_what_was_fed_back_is_lost() -> None:
    saved: dict[str, torch.Tensor] = {}

    def save(world: World) -> None:
        reducer = make(world, names="aabb", algorithm="direct", wire="int8", feedback=True)
        step(reducer, reducer.plan(buckets_for(), device=CPU), world, seed=0)
        reducer.end_step(applied=True, rescale=1.0)
        whole = _whole_state(world, reducer)
        if world.rank == 0:
            saved.update(whole)

    def load(world: World) -> torch.Tensor:
        reducer = make(world, names="aab", algorithm="direct", wire="int8", feedback=True)
        reducer.plan(buckets_for(bucket_bytes=100), device=CPU)  # other buckets too
        reducer.load_state(saved)
        return _whole_state(world, reducer)["residual"].sum(0)

    run_threads(4, save)
    expected = saved["residual"].sum(0)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(run_threads(3, load)[0], expected, rtol=1e-6, atol=1e-7)


def test_a_second_plan_keeps_what_was_fed_back() -> None:
    def case(world: World) -> None:
        reducer = make(world, names="ab", algorithm="direct", wire="int8", feedback=True)
        step(reducer, reducer.plan(buckets_for(), device=CPU), world, seed=0)
        reducer.end_step(applied=True, rescale=1.0)
        before = reducer.state()[0].tensor.clone()
        reducer.plan(buckets_for(bucket_bytes=100), device=CPU)
        assert float(before.abs().max()) > 0
        assert torch.equal(reducer.state()[0].tensor, before)

    run_threads(2, case)


def test_residuals_of_another_model_are_refused() -> None:
    def case(world: World) -> None:
        reducer = make(world, names="ab", algorithm="direct", wire="int8", feedback=True)
        reducer.plan(buckets_for(), device=CPU)
        with pytest.raises(CheckpointError, match="this model needs"):
            reducer.load_state({"residual": torch.zeros(2, 7)})

    run_threads(2, case)


def test_nothing_is_kept_where_nothing_is_lost() -> None:
    def case(world: World) -> None:
        reducer = make(world, names="ab", algorithm="direct", wire="fp32", feedback=True)
        reducer.plan(buckets_for(), device=CPU)
        assert reducer.state() == []

    run_threads(2, case)


def test_wires_that_a_backend_cannot_sum_are_refused() -> None:
    def start(buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        raise AssertionError("nothing is summed")

    with pytest.raises(UsageError, match="algorithm direct"):
        CastSum(start, wire="bf16", backend="horovod", bytes_of=lambda n, size: 0)
    with pytest.raises(UsageError, match="'int8'"):
        CastSum(start, wire="int8", backend="mpi", bytes_of=lambda n, size: 0)
