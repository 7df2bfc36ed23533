"""The loss scale: a pure state machine."""

from __future__ import annotations

import pytest

from hpctrain.errors import DivergedError, ExitCode
from hpctrain.reduce.data_parallel.loss_scale import LARGEST, SMALLEST, LossScale


def test_an_overflow_halves_the_scale_and_good_steps_double_it() -> None:
    scale = LossScale(value=8.0, dynamic=True, growth_steps=3).after_overflow()
    assert (scale.value, scale.skipped_total, scale.good_steps) == (4.0, 1, 0)
    for _ in range(2):
        scale = scale.after_good_step()
    assert scale.value == 4.0
    assert scale.after_good_step().value == 8.0


def test_a_static_scale_stays_and_counts() -> None:
    scale = LossScale().after_overflow().after_good_step()
    assert (scale.value, scale.skipped_total, scale.skipped_in_row) == (1.0, 1, 0)


def test_the_scale_stays_within_its_limits() -> None:
    high = LossScale(value=LARGEST, dynamic=True, growth_steps=1).after_good_step()
    low = LossScale(value=SMALLEST, dynamic=True).after_overflow()
    assert (high.value, low.value) == (LARGEST, SMALLEST)


def test_too_many_skipped_steps_in_a_row_end_the_run() -> None:
    scale = LossScale(max_skipped_in_row=2).after_overflow().after_overflow()
    assert scale.after_good_step().after_overflow().skipped_in_row == 1
    scale.check(used_value=1.0)
    with pytest.raises(DivergedError, match="3 steps in a row") as caught:
        scale.after_overflow().check(used_value=1.0)
    assert caught.value.exit_code == ExitCode.DIVERGED
    assert caught.value.agreed
