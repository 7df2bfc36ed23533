"""The interval that loses the least time, for what a checkpoint and a failure cost."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from hpctrain.checkpoint.retention.policy import Costs, advise, daly_interval_s
from hpctrain.checkpoint.saving.saver import FILE_NAME, CheckpointRequests, ask_for_save
from hpctrain.errors import UsageError
from hpctrain.resilience import CheckpointSignal
from hpctrain.telemetry import in_words


def test_for_cheap_checkpoints_it_is_youngs() -> None:
    found = daly_interval_s(cost_s=1e-3, failure_every_s=86_400)
    assert found == pytest.approx(math.sqrt(2 * 1e-3 * 86_400), rel=1e-3)


def test_the_higher_order_is_that_of_the_paper() -> None:
    # By hand, for a cost of 5 min and 24 h between failures, in minutes: the root of 2 * 5 * 1440 is 120,
    # that of 5 / 2880 is 1/24; 120 * (1 + 1/72 + 1/5184) - 5.
    found = daly_interval_s(cost_s=300, failure_every_s=86_400)
    assert found / 60 == pytest.approx(120 * (1 + 1 / 72 + 1 / 5184) - 5, rel=1e-12)


def test_where_failures_come_faster_than_checkpoints_it_is_the_time_between_them() -> None:
    assert daly_interval_s(cost_s=200, failure_every_s=100) == 100


def time_lost(*, interval_s: float, cost_s: float, failure_every_s: float, seed: int) -> float:
    """Share of the time lost in a simulated run: failures at random, work since the last checkpoint again."""
    draw = random.Random(seed)
    work_s = done_s = now_s = 0.0
    next_failure_s = draw.expovariate(1 / failure_every_s)
    while done_s < 200 * failure_every_s:
        segment_s = interval_s + cost_s
        if now_s + segment_s <= next_failure_s:
            now_s += segment_s
            work_s += interval_s
        else:
            now_s = next_failure_s
            next_failure_s = now_s + draw.expovariate(1 / failure_every_s)
        done_s = now_s
    return 1 - work_s / now_s


def test_in_a_simulation_no_much_shorter_or_longer_interval_loses_less() -> None:
    cost_s, failure_every_s = 20.0, 3600.0
    best_s = daly_interval_s(cost_s=cost_s, failure_every_s=failure_every_s)

    def lost(factor: float) -> float:
        runs = [
            time_lost(interval_s=best_s * factor, cost_s=cost_s, failure_every_s=failure_every_s, seed=seed)
            for seed in range(5)
        ]
        return sum(runs) / len(runs)

    at_best = lost(1.0)
    assert at_best < lost(0.4)
    assert at_best < lost(2.5)
    reported = advise(cost_s=cost_s, write_s=cost_s, failures_per_day=24).lost_share
    assert reported == pytest.approx(at_best, abs=0.02)


def test_it_is_never_shorter_than_a_background_write_takes() -> None:
    found = advise(cost_s=0.01, write_s=500.0, failures_per_day=1)
    assert found.interval_s == pytest.approx(499.99)
    assert advise(cost_s=0.01, write_s=0.2, failures_per_day=1).interval_s < 60


def test_it_follows_the_median_of_what_was_measured() -> None:
    costs = Costs()
    assert costs.advice(failures_per_day=1) is None
    for stall_s in (0.5, 0.5, 90.0):  # one slow one, when the disk was busy
        costs.add(stall_s=stall_s, write_s=stall_s)
    found = costs.advice(failures_per_day=1)
    assert found is not None
    assert found == advise(cost_s=0.5, write_s=0.5, failures_per_day=1)
    reported = found.describe()
    assert (
        "stops training for 0.5 s and a failure comes every 24 h: save every 4.89 min (Young/Daly)"
        in reported
    )


@settings(max_examples=200, deadline=None)
@given(cost_s=st.floats(0, 1e6), write_s=st.floats(0, 1e6), failures_per_day=st.floats(1e-3, 1e4))
def test_it_is_finite_positive_or_zero_and_reported_for_all_costs(
    cost_s: float, write_s: float, failures_per_day: float
) -> None:
    found = advise(cost_s=cost_s, write_s=write_s, failures_per_day=failures_per_day)
    assert 0 <= found.interval_s < math.inf
    assert 0 <= found.lost_share <= 1
    assert "save every" in found.describe()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.123, "0.12 s"), (9.6, "9.6 s"), (45, "45 s"), (119, "119 s"), (294, "4.9 min"), (86_400, "24 h"),
     (10 * 86_400, "10 days")],
)  # fmt: skip
def test_times_are_reported_in_units_that_fit(seconds: float, text: str) -> None:
    assert in_words(seconds) == text


def test_a_cost_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 0"):
        daly_interval_s(cost_s=-1, failure_every_s=10)


# ---------------------------------------------------------------------- on demand


def test_the_file_asks_until_it_is_taken(tmp_path: Path) -> None:
    requests = CheckpointRequests(run_directory=tmp_path, every_s=0)
    assert not requests.asked()
    (tmp_path / FILE_NAME).touch()
    assert requests.asked()
    assert requests.asked()
    requests.taken()
    assert not (tmp_path / FILE_NAME).exists()
    assert not requests.asked()


def test_the_directory_is_looked_at_no_more_often_than_said(tmp_path: Path) -> None:
    requests = CheckpointRequests(run_directory=tmp_path, every_s=3600)
    assert not requests.asked()
    (tmp_path / FILE_NAME).touch()
    assert not requests.asked()


@pytest.mark.timing
def test_a_signal_asks_once_also_where_it_reaches_the_ranks_at_different_moments() -> None:
    save_signal = CheckpointSignal().install()
    try:
        requests = CheckpointRequests(run_directory=None, save_signal=save_signal, same_request_s=0.2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert requests.asked()
        requests.taken()
        assert not requests.asked()
        time.sleep(0.25)
        requests.taken()  # another rank was asked first; then the signal reaches this one:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert not requests.asked()
        time.sleep(0.25)
        assert not requests.asked()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert requests.asked()
    finally:
        save_signal.restore()


def test_asking_in_a_directory_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no recipe\.toml"):
        ask_for_save(tmp_path)
    (tmp_path / "recipe.toml").touch()
    assert ask_for_save(tmp_path) == tmp_path / FILE_NAME
    assert CheckpointRequests(run_directory=tmp_path).asked()
