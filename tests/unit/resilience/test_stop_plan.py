"""When a run must stop: a pure function of what was measured and of the time that is left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpctrain.resilience import RecentTimes, TimeToStop


def plan_of(
    *, steps: Sequence[float], saves: Sequence[float] = (), margin_s: float = 10.0, **options: float
) -> TimeToStop:
    plan = TimeToStop(margin_s=margin_s, **options)
    for seconds in steps:
        plan.steps.add(seconds)
    for seconds in saves:
        plan.saves.add(seconds)
    return plan


def test_before_the_first_duration_there_is_no_p95() -> None:
    assert RecentTimes(5).p95() is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([3.0], 3), ([1.0, 9.0, 2.0], 9), (list(range(1, 101)), 95), ([7.0] + [1.0] * 19, 1)],
)
def test_the_p95_is_the_smallest_duration_that_95_percent_do_not_exceed(
    seconds: list[float], expected: float
) -> None:
    times = RecentTimes(100)
    for value in seconds:
        times.add(value)
    assert times.p95() == expected


def test_old_durations_are_forgotten() -> None:
    times = RecentTimes(3)
    for value in (50.0, 1.0, 2.0, 3.0):
        times.add(value)
    assert times.p95() == 3


@pytest.mark.parametrize(("left_s", "stops"), [(15.1, False), (14.9, True), (-3.0, True), (None, False)])
def test_a_run_stops_when_less_is_left_than_a_step_a_save_and_the_margin(
    left_s: float | None, stops: bool
) -> None:
    assert plan_of(steps=[2.0], saves=[3.0]).must_stop(left_s) is stops


def test_what_comes_before_the_next_decision_is_counted_too() -> None:
    plan = plan_of(steps=[2.0], saves=[3.0])
    plan.evaluations.add(20.0)
    assert plan.needed_s() == 15
    assert plan.needed_s(num_saves=2) == 18
    assert plan.needed_s(evaluates=True) == 35


def test_until_a_save_has_been_measured_its_duration_is_assumed() -> None:
    plan = plan_of(steps=[2.0], assumed_save_s=40.0)
    assert plan.needed_s() == 52
    plan.saves.add(1.0)
    assert plan.needed_s() == 13
