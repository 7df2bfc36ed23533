"""Sums of squares of tensors of any shape and dtype."""

from __future__ import annotations

import math

import pytest
import torch

from hpctrain.reduce.contract.step_end import ROW_ELEMS, square_of_all


def test_the_sum_over_tensors_of_any_shape_and_dtype_is_that_in_float64() -> None:
    torch.manual_seed(3)
    tensors = [
        torch.randn(3 * ROW_ELEMS + 5),
        torch.randn(70, 40).t(),
        torch.zeros(0, 4),
        torch.tensor(2.5),
        torch.randn(ROW_ELEMS).to(torch.bfloat16),
        torch.randn(9, dtype=torch.float64),
    ]
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert square_of_all(tensors) == pytest.approx(expected, rel=1e-6)
    assert square_of_all([]) == square_of_all([torch.zeros(0)]) == 0.0


def test_squares_that_float16_and_float32_cannot_hold_are_summed() -> None:
    assert square_of_all([torch.full((4,), 60_000.0, dtype=torch.float16)]) == pytest.approx(
        1.44e10, rel=1e-3
    )
    assert square_of_all([torch.full((4,), 1e30)]) == pytest.approx(4e60, rel=1e-6)


def test_infinity_and_nan_remain() -> None:
    for dtype in (torch.float32, torch.float16):
        assert (
            square_of_all([torch.ones(3, dtype=dtype), torch.full((2,), math.inf, dtype=dtype)]) == math.inf
        )
        assert math.isnan(
            square_of_all([torch.ones(3, dtype=dtype), torch.full((2,), math.nan, dtype=dtype)])
        )
