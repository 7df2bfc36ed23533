"""Sums, means and maxima of what a script measures."""

from __future__ import annotations

import math

import pytest
import torch

from hpctrain import init
from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.collectives.values import all_reduce_values
from hpctrain.errors import BufferMismatch, UsageError


@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("max", 3.0)])
def test_numbers_by_name(op: str, expected: float) -> None:
    def case(world: World) -> dict[str, float]:
        mine = {"loss": 1.0 + world.rank, "zero": 0}
        if world.rank == 1:
            mine = dict(reversed(mine.items()))  # names count, not their order
        return all_reduce_values(world, mine, op=op)

    assert run_threads(3, case) == [{"loss": expected, "zero": 0.0}] * 3


@pytest.mark.parametrize(("op", "expected"), [("sum", 0.0), ("mean", 0.0)])
def test_numbers_are_added_in_rank_order_without_compensation(op: str, expected: float) -> None:
    """1e16 + 1.0 is 1e16 in float64; the builtin `sum` of Python 3.12 and later would find 1.0 in the end."""
    parts = [1e16, 1.0, -1e16]
    found = run_threads(3, lambda world: all_reduce_values(world, {"x": parts[world.rank]}, op=op))
    assert found == [{"x": expected}] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("mean", 2.0), ("max", 3.0)])
def test_tensors_keep_shape_and_dtype(op: str, expected: float, dtype: torch.dtype) -> None:
    def case(world: World) -> torch.Tensor:
        mine = torch.full((3, 2), 1.0 + world.rank, dtype=dtype).t()
        found = all_reduce_values(world, mine, op=op)
        assert mine.tolist() == [[1.0 + world.rank] * 3] * 2  # left as it was
        return found

    for found in run_threads(3, case):
        assert torch.equal(found, torch.full((2, 3), expected, dtype=dtype))


def test_half_precision_does_not_overflow_on_the_way_to_a_mean() -> None:
    def case(world: World) -> float:
        return float(all_reduce_values(world, torch.tensor(60000.0, dtype=torch.float16), op="mean"))

    assert run_threads(2, case) == [pytest.approx(60000, rel=1e-3)] * 2


def test_a_maximum_with_nan_is_nan_on_every_rank() -> None:
    def case(world: World) -> float:
        return all_reduce_values(world, {"x": math.nan if world.rank == 1 else 5.0}, op="max")["x"]

    assert all(math.isnan(x) for x in run_threads(3, case))


def test_other_names_and_other_shapes_are_reported_to_every_rank() -> None:
    def names(world: World) -> str:
        with pytest.raises(BufferMismatch) as caught:
            all_reduce_values(world, {"loss": 1.0} if world.rank < 2 else {"lost": 1.0})
        return str(caught.value)

    def shapes(world: World) -> str:
        with pytest.raises(BufferMismatch) as caught:
            all_reduce_values(world, torch.zeros(3 + (world.rank == 2)))
        return str(caught.value)

    for case in (names, shapes):
        texts = run_threads(3, case)
        assert len(set(texts)) == 1
        assert "but rank 2" in texts[0]


def test_unknown_operations_and_means_of_whole_numbers_are_refused() -> None:
    with init() as session:
        with pytest.raises(UsageError, match="sum, mean or max"):
            session.all_reduce({"x": 1.0}, op="min")  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="int64"):
            session.all_reduce(torch.tensor([1, 2]), op="mean")
        assert session.all_reduce(torch.tensor([1, 2])).tolist() == [1, 2]
        assert session.all_reduce({"x": 2.0}, op="mean") == {"x": 2.0}
