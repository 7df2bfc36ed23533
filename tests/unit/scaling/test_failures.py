"""The simulation of failures against the formulas of Daly 2006."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hpctrain.checkpoint import daly_interval_s
from hpctrain.scaling import SimulatedJob, simulate_job, sweep

HOUR_S = 3600.0
JOB = SimulatedJob(
    nodes=100, node_hours_between_failures=2000, interval_s=HOUR_S, save_s=60.0, spares=10_000, repair_s=0.0,
    detect_s=0.0, restart_s=120.0, queue_s=0.0,
)  # fmt: skip
pytest.importorskip("simpy")


@pytest.mark.parametrize("interval_s", [600.0, 3000.0, 20_000.0])
def test_shares_are_those_of_dalys_formula(interval_s: float) -> None:
    outcome = simulate_job(replace(JOB, interval_s=interval_s), hours=40_000, seed=1)
    mean = JOB.between_failures_s
    wall = mean * math.exp(120.0 / mean) * (math.exp((interval_s + 60.0) / mean) - 1)  # equation 20
    assert outcome.trained == pytest.approx(interval_s / wall, rel=0.02)
    assert outcome.failures == pytest.approx(40_000 / 20, rel=0.1)


def test_the_best_interval_of_the_sweep_is_dalys() -> None:
    best = daly_interval_s(cost_s=60.0, failure_every_s=JOB.between_failures_s)
    intervals = [best * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    found = sweep(JOB, intervals_s=intervals, spares=[10_000], hours=60_000, seed=7)
    shares = [found[interval, 10_000].trained for interval in intervals]
    assert max(shares) == shares[2]


def test_shares_add_up_to_one() -> None:
    outcome = simulate_job(replace(JOB, spares=1, repair_s=4 * HOUR_S, queue_s=HOUR_S), hours=5000, seed=2)
    total = outcome.trained + outcome.saving + outcome.lost + outcome.down + outcome.queued
    assert total == pytest.approx(1.0, abs=1e-3)


def test_spare_nodes_save_the_wait_in_the_queue() -> None:
    job = replace(JOB, repair_s=24 * HOUR_S, queue_s=6 * HOUR_S)
    found = sweep(job, intervals_s=[HOUR_S], spares=[0, 1, 2, 8], hours=20_000, seed=3)
    queued = [found[HOUR_S, count].queued for count in (0, 1, 2, 8)]
    assert queued == sorted(queued, reverse=True)
    assert queued[0] > 0.1
    assert queued[-1] < 0.01
