"""The attribution of steps and the POP efficiencies, of runs whose truth is known since they are simulated here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.errors import UsageError
from hpctrain.scaling import (
    Efficiency,
    StepTimes,
    against,
    attribute,
    efficiency_of,
    read_efficiency,
    read_step_times,
)
from hpctrain.telemetry import PART_KEYS, PART_NAMES, RecordWriter, StepClock, read_records
from hpctrain.train import EfficiencyWatch

STEPS, TRANSFER_S = 60, 0.004


def simulated(before_s: np.ndarray, after_s: np.ndarray, *, samples: int = 8) -> StepTimes:
    """A run whose ranks compute `before_s` and `after_s` around each reduction, shape (ranks, steps), the second in
    input, optimizer and writing records. The reduction takes TRANSFER_S once the last rank has come."""
    num_ranks, num_steps = before_s.shape
    now = np.zeros(num_ranks)
    exposed, step = np.zeros_like(before_s), np.zeros_like(before_s)
    for k in range(num_steps):
        arrived = now + before_s[:, k]
        reduced = arrived.max() + TRANSFER_S
        ended = reduced + after_s[:, k]
        exposed[:, k], step[:, k] = reduced - arrived, ended - now
        now = ended
    zero = np.zeros_like(before_s)
    return StepTimes(
        steps=np.arange(1, num_steps + 1),
        samples=np.full(num_steps, samples),
        seconds={
            "step": step, "exposed_sync": exposed, "after_sync": after_s, "compute": before_s * 0.75 + after_s * 0.5,
            "hidden_sync": before_s * 0.25, "input": before_s * 0.25, "other": after_s * 0.5, "checkpoint": zero,
            "evaluation": zero, "bubble": zero,
        },
        carried=np.concatenate([zero[:, :1], after_s[:, :-1]], axis=1),
    )  # fmt: skip


def random_run(num_ranks: int = 5) -> tuple[StepTimes, np.ndarray]:
    """Returns the run, and each rank's own time between two reductions, shape (ranks, steps)."""
    draw = np.random.default_rng(3)
    before = draw.uniform(0.03, 0.06, (num_ranks, STEPS))
    after = draw.uniform(0.0, 0.02, (num_ranks, STEPS))
    own = before.copy()
    own[:, 1:] += after[:, :-1]
    return simulated(before, after), own


def part(found: np.ndarray, name: str) -> np.ndarray:
    return found[..., PART_NAMES.index(name)]


def test_the_parts_add_up_and_waiting_is_told_from_the_network_also_where_ranks_differ_after_the_reduction() -> (
    None
):
    times, own = random_run()
    found = attribute(times)
    np.testing.assert_allclose(found.sum(axis=-1), times.seconds["step"], rtol=1e-12)
    np.testing.assert_allclose(part(found, "waiting"), own.max(axis=0) - own, atol=1e-12)
    np.testing.assert_allclose(part(found, "exposed_reduction"), TRANSFER_S, atol=1e-12)
    assert (found >= 0).all()


def test_factors_multiply_and_are_those_of_the_ideal_network() -> None:
    times, own = random_run()
    found = efficiency_of(times)
    total_s = own.max(axis=0).sum() + STEPS * TRANSFER_S
    factors = found.factors
    assert factors.load_balance == pytest.approx(own.sum(axis=1).mean() / own.sum(axis=1).max())
    assert factors.serialisation == pytest.approx(own.sum(axis=1).max() / own.max(axis=0).sum())
    assert factors.transfer == pytest.approx(own.max(axis=0).sum() / total_s)
    assert factors.parallel == pytest.approx(own.mean(axis=0).sum() / total_s)
    assert sum(found.parts.values()) == pytest.approx(times.seconds["step"].mean())
    assert Efficiency.from_document(json.loads(json.dumps(found.document()))) == found


def test_a_bubble_is_serialisation_and_not_own_time_and_the_parts_still_add_up() -> None:
    """Ranks that compute 30 and 20 ms of a step, and wait for other stages for 10 and 15 ms before they arrive."""
    steps = np.ones((2, STEPS))
    arrivals = steps * np.array([[0.04], [0.035]])
    times = simulated(arrivals, np.zeros_like(steps))
    bubble = steps * np.array([[0.01], [0.015]])
    times = replace(
        times, seconds={**times.seconds, "bubble": bubble, "compute": times.seconds["compute"] - bubble}
    )
    found = attribute(times)
    np.testing.assert_allclose(found.sum(axis=-1), times.seconds["step"], rtol=1e-12)
    np.testing.assert_allclose(part(found, "bubble"), bubble)
    np.testing.assert_allclose(part(found, "waiting"), steps * np.array([[0], [0.005]]), atol=1e-12)
    np.testing.assert_allclose(part(found, "exposed_reduction"), TRANSFER_S, atol=1e-12)
    efficiency = efficiency_of(times)
    factors = efficiency.factors
    assert efficiency.parts["waiting"] == pytest.approx(0.0025)
    assert factors.load_balance == pytest.approx(25 / 30)
    assert factors.serialisation == pytest.approx(30 / 40)
    assert factors.transfer == pytest.approx(40 / 44)
    assert factors.parallel == pytest.approx(25 / 44)


def test_records_of_before_pipelines_have_no_bubble(tmp_path: Path) -> None:
    times, _ = random_run(num_ranks=2)
    seconds = {name: values for name, values in times.seconds.items() if name != "bubble"}
    written(tmp_path, replace(times, seconds=seconds), ranks=2)
    assert (read_step_times(tmp_path).seconds["bubble"] == 0).all()
    document = efficiency_of(times).document()
    del document["parts"]["bubble"]
    assert Efficiency.from_document(document) == efficiency_of(times)


def test_a_steady_slow_rank_is_load_balance_and_an_alternating_one_is_serialisation() -> None:
    steady, alternating = np.full((4, STEPS), 0.05), np.full((4, STEPS), 0.05)
    steady[1] += 0.05
    for k in range(STEPS):
        alternating[k % 4, k] += 0.05
    nothing = np.zeros_like(steady)
    factors = efficiency_of(simulated(steady, nothing)).factors
    assert (factors.load_balance, factors.serialisation) == pytest.approx((0.625, 1.0))
    factors = efficiency_of(simulated(alternating, nothing)).factors
    assert (factors.load_balance, factors.serialisation) == pytest.approx((1.0, 0.625))
    assert factors.transfer == pytest.approx(0.1 / 0.104)


def test_the_global_efficiency_is_the_computing_that_the_reference_needs_over_the_time_of_all_ranks() -> None:
    times, _ = random_run()
    run = efficiency_of(times)
    alone = efficiency_of(simulated(np.full((1, STEPS), 0.04), np.full((1, STEPS), 0.001), samples=4))
    scaling = against(run, reference=alone)
    needed_s = alone.computed_s / 4 * times.samples.sum()
    assert scaling.global_efficiency == pytest.approx(needed_s / times.seconds["step"].sum(), rel=0.01)
    assert scaling.relative_speed == pytest.approx(
        times.samples.sum() / times.seconds["step"].sum() * alone.step_s / 4
    )
    itself = against(alone, reference=alone)
    assert (itself.computation, itself.relative_speed) == (1.0, 1.0)


def test_windows_over_the_ranks_find_what_the_records_of_all_ranks_say(tmp_path: Path) -> None:
    times, _ = random_run(num_ranks=3)

    def case(world: World) -> object:
        records = RecordWriter(tmp_path / f"{world.rank}.jsonl")
        watch = EfficiencyWatch(world, records=records, clock=StepClock())
        for k, step in enumerate(times.steps.tolist()):
            seconds = {
                name: float(times.seconds[name][world.rank, k]) for name in (*PART_KEYS, "step", "after_sync")
            }
            watch.after_step(step, seconds, samples=8, window_ends=step in (20, 21))
        watch.ends(STEPS)
        records.close()
        return watch.total

    totals = run_threads(3, case)
    later = StepTimes(
        steps=times.steps[1:],
        samples=times.samples[1:],
        seconds={name: values[:, 1:] for name, values in times.seconds.items()},
        carried=times.carried[:, 1:],
    )
    expected = efficiency_of(later).document()
    for total in totals:
        assert total["steps"] == STEPS - 1
        for name, value in expected.items():
            assert total[name] == pytest.approx(value), name
    windows = list(read_records(tmp_path / "0.jsonl"))
    assert [(window["step"], window["steps"]) for window in windows] == [(20, 19), (21, 1), (60, 39)]
    for window in windows:
        factors = window["factors"]
        assert factors["parallel"] == pytest.approx(factors["load_balance"] * factors["communication"])
        assert sum(window["parts"].values()) == pytest.approx(window["step_s"])
    assert not list(read_records(tmp_path / "1.jsonl"))


def written(directory: Path, times: StepTimes, *, ranks: int) -> None:
    (directory / "metrics").mkdir()
    (directory / "environment.json").write_text(json.dumps({"ranks": [{}] * times.num_ranks}))
    for rank in range(ranks):
        writer = RecordWriter(directory / "metrics" / f"rank-{rank:05}.jsonl")
        for k, step in enumerate(times.steps.tolist()):
            seconds = {name: float(values[rank, k]) for name, values in times.seconds.items()}
            for scale in (2.0, 1.0) if step == 7 else (1.0,):  # step 7 was done again after a resume
                scaled = {name: scale * value for name, value in seconds.items()}
                writer.write({"kind": "step", "step": step, "samples": 2, "seconds": scaled})
        writer.close()


def test_records_of_all_ranks_are_read_and_the_later_one_of_a_step_counts(tmp_path: Path) -> None:
    times, _ = random_run()
    written(tmp_path, times, ranks=5)
    found = read_step_times(tmp_path, first=1, last=30)
    assert found.steps.tolist() == list(range(1, 31))
    assert found.samples.tolist() == [10] * 30
    for name, values in times.seconds.items():
        np.testing.assert_array_equal(found.seconds[name], values[:, :30])
    later = read_step_times(tmp_path, last=30)
    assert later.steps[0] == 2
    np.testing.assert_array_equal(later.carried, times.carried[:, 1:30])


def test_missing_records_are_reported_with_what_to_do(tmp_path: Path) -> None:
    times, _ = random_run()
    with pytest.raises(UsageError, match="give the directory of a run"):
        read_step_times(tmp_path)
    written(tmp_path, times, ranks=4)
    with pytest.raises(UsageError, match=r"records of rank 4 of 5 .*telemetry\.ranks = 'all'"):
        read_step_times(tmp_path)
    (tmp_path / "environment.json").write_text(json.dumps({"ranks": [{}] * 4}))
    with pytest.raises(UsageError, match="no step from 100 to the end that all 4 ranks recorded"):
        read_step_times(tmp_path, first=100)
    with pytest.raises(UsageError, match="at least two steps"):
        read_efficiency(tmp_path)
