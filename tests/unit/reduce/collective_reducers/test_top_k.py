"""Top-k reduction, with ranks as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpctrain.comm import World
from hpctrain.errors import UsageError
from hpctrain.reduce.collective_reducers.top_k import TopKMessage, TopKReducer
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.topology import Topology
from tests.unit.reduce.bucket_steps import (
    Steps,
    buckets_of,
    in_gradient_space,
    on_ranks,
    random_gradients,
    true_sums,
)
from tests.unit.reduce.error_feedback_cases import RANK_COUNTS, SparseFeedbackCases


class TestTopK(SparseFeedbackCases):
    def make(self, world: World, *, start_step: int = 0, topology: Topology | None = None) -> TopKReducer:
        return TopKReducer(world.duplicate(), fraction=0.1, start_step=start_step, topology=topology)


class TestTopKOfHalfPrecisionValues(SparseFeedbackCases):
    def make(self, world: World, *, start_step: int = 0, topology: Topology | None = None) -> TopKReducer:
        return TopKReducer(
            world.duplicate(),
            fraction=0.1,
            value_dtype=torch.float16,
            start_step=start_step,
            topology=topology,
        )


@pytest.mark.parametrize("num_ranks", RANK_COUNTS)
def test_of_all_elements_the_sum_is_exact(num_ranks: int) -> None:
    gradients = random_gradients()

    def each(world: World) -> Steps:
        reducer = TopKReducer(world.duplicate(), fraction=1.0, start_step=0)
        return Steps.of(world, lambda w: reducer, buckets=buckets_of()).run(gradients, count=1)

    exact = in_gradient_space(true_sums(gradients, num_ranks=num_ranks, count=1))
    found = on_ranks(num_ranks, each)[0].outputs[0]
    torch.testing.assert_close(in_gradient_space(found).double(), exact, rtol=0, atol=1e-5)


def test_each_rank_sends_its_largest() -> None:
    def each(world: World) -> Steps:
        reducer = TopKReducer(world.duplicate(), fraction=0.2, start_step=0)
        steps = Steps.of(world, lambda w: reducer, buckets=buckets_of([(10,)]))
        small = torch.arange(10) * 0.01
        large = {0: {3: 5.0, 7: -9.0}, 1: {3: 2.0, 0: -4.0}}[world.rank]
        for place, value in large.items():
            small[place] = value
        steps.step([small])
        return steps

    ranks = on_ranks(2, each)
    expected = torch.zeros(10)
    expected[0], expected[3], expected[7] = -4.0, 7.0, -9.0
    assert torch.equal(ranks[1].outputs[0][0], expected)
    assert ranks[0].state()["residual"].tensor[0, [3, 7]].tolist() == [0, 0]
    assert ranks[0].state()["residual"].tensor[0, 9] == pytest.approx(0.09)


@pytest.mark.parametrize(("value_dtype", "value_bytes"), [(None, 4), (torch.float16, 2)])
def test_bytes_are_places_values_range_and_flags(value_dtype: torch.dtype | None, value_bytes: int) -> None:
    def each(world: World) -> int:
        reducer = TopKReducer(world.duplicate(), fraction=0.01, value_dtype=value_dtype, start_step=0)
        steps = Steps.of(world, lambda w: reducer, buckets=buckets_of([(100, 40)], bucket_bytes=10**6))
        return steps.run(random_gradients(shapes=[(100, 40)]), count=2).reducer.bytes_sent()

    message = 8 + 40 * 4 + 40 * value_bytes + 8
    assert on_ranks(3, each) == [2 * 2 * message] * 3


def test_places_take_eight_bytes_where_four_do_not_reach() -> None:
    def message(numel: int) -> TopKMessage:
        bucket = Bucket(torch.float32, (Slot(0, 0, numel, numel, 0),), numel + 1)
        return TopKMessage.of(bucket, fraction=1e-9, value_dtype=None)

    assert message(2**31).place_dtype is torch.int32
    assert message(2**31 + 1).place_dtype is torch.int64


@pytest.mark.parametrize(
    "options", [{"fraction": 0.0}, {"fraction": 1.5}, {"value_dtype": torch.bfloat16}, {"start_step": -1}]
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give"):
        on_ranks(1, lambda world: TopKReducer(world, **options))
