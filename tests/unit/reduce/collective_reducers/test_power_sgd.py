"""Low-rank reduction, with ranks as threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.errors import UsageError
from hpctrain.reduce.collective_reducers.power_sgd import LowRankReducer, matrix_shape
from hpctrain.topology import Topology
from tests.unit.reduce.bucket_steps import (
    SHAPES,
    Gradients,
    Steps,
    buckets_of,
    in_gradient_space,
    on_ranks,
    random_gradients,
    true_sums,
    whole_state,
)
from tests.unit.reduce.error_feedback_cases import RANK_COUNTS, SparseFeedbackCases


class TestLowRank(SparseFeedbackCases):
    def make(self, world: World, *, start_step: int = 0, topology: Topology | None = None) -> LowRankReducer:
        return LowRankReducer(world.duplicate(), rank=2, start_step=start_step, topology=topology)


def run(num_ranks: int, *, rank: int, gradients: Gradients, count: int = 1) -> list[Steps]:
    def each(world: World) -> Steps:
        reducer = LowRankReducer(world.duplicate(), rank=rank, start_step=0)
        return Steps.of(world, lambda w: reducer, buckets=buckets_of()).run(gradients, count=count)

    return on_ranks(num_ranks, each)


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_a_sum_of_that_rank_arrives_whole(num_ranks: int) -> None:
    def gradients(step: int, rank: int) -> list[torch.Tensor]:
        """Each rank's own combination of two columns that all share."""
        shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(rank)
        found = []
        for shape in SHAPES:
            if len(shape) == 1:
                found.append(torch.randn(shape, generator=own))
            else:
                rest = math.prod(shape[1:])
                columns = torch.randn(shape[0], 2, generator=shared)
                found.append((columns @ torch.randn(2, rest, generator=own)).view(shape))
        return found

    ranks = run(num_ranks, rank=2, gradients=gradients)
    exact = in_gradient_space(true_sums(gradients, num_ranks=num_ranks, count=1))
    torch.testing.assert_close(in_gradient_space(ranks[0].outputs[0]).double(), exact, rtol=0, atol=1e-4)
    assert whole_state(ranks)["residual"].abs().max() < 1e-4


@pytest.mark.parametrize("rank", [16, 1000])
@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_where_factors_would_not_be_smaller_the_sum_is_exact(num_ranks: int, rank: int) -> None:
    gradients = random_gradients()
    ranks = run(num_ranks, rank=rank, gradients=gradients, count=2)
    exact = in_gradient_space(true_sums(lambda s, r: gradients(1, r), num_ranks=num_ranks, count=1))
    torch.testing.assert_close(in_gradient_space(ranks[0].outputs[1]).double(), exact, rtol=0, atol=1e-5)
    assert not whole_state(ranks)["residual"].any()


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((20,), 1, None),
        ((), 1, None),
        ((64, 32, 3, 3), 4, (64, 288)),
        ((40, 40), 10, (40, 40)),
        ((40, 40), 11, None),
        ((1000, 3), 4, None),
        ((0, 7), 1, None),
        ((10, 0), 1, None),
    ],
)
def test_which_parameters_are_worth_factors(
    shape: tuple[int, ...], rank: int, expected: tuple[int, int] | None
) -> None:
    assert matrix_shape(shape, rank=rank) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_more_than_one_step_finds_the_largest_directions(num_ranks: int) -> None:
    """The factors are warm: what is delivered of a gradient that stays approaches its best approximation."""
    generator = torch.Generator().manual_seed(2)
    left = torch.linalg.qr(torch.randn(40, 40, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(30, 30, generator=generator)).Q
    values = 0.5 ** torch.arange(30.0)
    matrix = left[:, :30] * values @ right.T

    def each(world: World) -> float:
        reducer = LowRankReducer(world.duplicate(), rank=3, start_step=0)
        steps = Steps.of(world, lambda w: reducer, buckets=buckets_of([(40, 30)]))
        for _ in range(6):
            steps.step([matrix / world.num_ranks])
            steps.reducer.load_state({**whole_state([steps]), "residual": torch.zeros(world.num_ranks, 1200)})
        return float((steps.outputs[-1][0].view(40, 30) - matrix).norm())

    best = float(values[3:].norm())
    assert on_ranks(num_ranks, each)[0] == pytest.approx(best, rel=1e-2)


def test_bytes_are_two_thin_messages_and_the_rest_as_it_is() -> None:
    shapes = [(40, 30), (30,)]
    one_bucket = buckets_of(shapes, bucket_bytes=10**6)

    def each(world: World) -> int:
        reducer = LowRankReducer(world.duplicate(), rank=2, start_step=0)
        steps = Steps.of(world, lambda w: reducer, buckets=one_bucket)
        return steps.run(random_gradients(shapes=shapes), count=3).reducer.bytes_sent()

    # P 40 x 2, Q 30 x 2, a bias of 30, two flags and a mark; by a ring's rank of four, 3/4 twice.
    first, second = 4 * (40 * 2 + 30 + 2 + 1), 4 * 30 * 2
    assert on_ranks(4, each) == [3 * (first * 6 // 4 + second * 6 // 4)] * 4


def test_factors_of_another_rank_are_left() -> None:
    saved = whole_state(run(2, rank=2, gradients=random_gradients(), count=3))

    def load(world: World) -> Steps:
        steps = Steps.of(
            world, lambda w: LowRankReducer(w.duplicate(), rank=3, start_step=0), buckets=buckets_of()
        )
        steps.reducer.load_state(saved)
        return steps.run(random_gradients(), first=3, count=1)

    ranks = on_ranks(2, load)
    assert int(whole_state(ranks)["low_rank/steps"]) == 4
    assert all(t.isfinite().all() for t in ranks[0].outputs[0].values())


@pytest.mark.parametrize("options", [{"rank": 0}, {"start_step": -1}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give"):
        on_ranks(1, lambda world: LowRankReducer(world, **options))
