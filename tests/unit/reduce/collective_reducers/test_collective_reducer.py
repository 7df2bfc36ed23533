"""Buckets summed by a backend's collective operations, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import UsageError
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.collective_reducers.collective_reducer import CastSum, CollectiveReducer, split_bucket
from hpctrain.topology import Topology
from tests import reducer_cases
from tests.reducer_cases import (
    ALGORITHMS,
    CPU,
    LAYOUTS,
    buckets_for,
    make,
    topology_of,
)
from tests.unit.reduce.error_feedback_cases import ErrorFeedbackCases

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


class TestDirectInt8(ErrorFeedbackCases):
    """One rank alone encodes nothing."""

    num_ranks_tested, held_back = (2, 3, 4), 1e-4

    def make(
        self, world: World, *, start_step: int = 0, topology: Topology | None = None
    ) -> CollectiveReducer:
        return CollectiveReducer.direct(
            world.duplicate(), topology=topology or topology_of("abcd"[: world.num_ranks]),
            codec=codec_named("int8"), feedback=True, piece_elems=500,
        )  # fmt: skip

    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
    def test_on_another_number_of_ranks_each_takes_its_share_of_what_was_left(
        self, before: int, after: int, whole: bool
    ) -> None:
        super().test_on_another_number_of_ranks_each_takes_its_share_of_what_was_left(before, after, whole)
