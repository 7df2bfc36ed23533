"""Values of the metrics follow from the records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hpctrain.telemetry import METRICS, RunMetrics, Scope

SECONDS = {
    "step": 0.1, "input": 0.01, "compute": 0.05, "bubble": 0.01, "hidden_sync": 0.02, "exposed_sync": 0.02,
    "checkpoint": 0.004, "evaluation": 0.003, "other": 0.003, "sync": 0.04, "after_sync": 0.01,
}  # fmt: skip


def step(number: int, *, samples: int, **other: Any) -> dict[str, Any]:
    record = {
        "kind": "step", "time": 1000.0 + number, "step": number, "epoch": 0, "samples": 8, "skipped_samples": 0,
        "global_samples": samples, "loss": 1 / number, "lr": 0.1, "grad_norm": 2.0, "loss_scale": 1.0,
        "applied": True, "seconds": SECONDS,
    }  # fmt: skip
    return {**record, **other}


def begins(**other: Any) -> dict[str, Any]:
    return {
        "kind": "begins", "time": 1000.0, "step": 0, "samples": 0, "total_steps": 20, "micro_batches": 1, **other,
    }  # fmt: skip


def values(metrics: RunMetrics) -> Mapping[str, Mapping[tuple[str, ...], float]]:
    return {metric.name: {one.labels: one.value for one in series} for metric, series in metrics.snapshot()}


def test_the_parts_of_a_step_add_up_and_fall_into_buckets() -> None:
    metrics = RunMetrics(rank=0)
    metrics.receive(begins())
    for number in range(1, 11):
        seconds = {**SECONDS, "step": number / 10}
        metrics.receive(step(number, samples=16 * number, seconds=seconds, applied=number != 4))
    found = values(metrics)
    parts = found["hpctrain_step_part_seconds_total"]
    assert sum(parts.values()) == pytest.approx(10 * 0.1)
    # Without that in which a reduction was in flight.
    assert parts["0", "compute"] == pytest.approx(10 * 0.03)
    assert parts["0", "bubble"] == pytest.approx(10 * 0.01)
    assert parts["0", "hidden_sync"] == pytest.approx(10 * 0.02)
    assert found["hpctrain_step_seconds"]["0",] == pytest.approx(5.5)
    ((histogram, (series,)),) = [
        entry for entry in metrics.snapshot() if entry[0].name == "hpctrain_step_seconds"
    ]
    bounds = [*histogram.buckets, float("inf")]
    counted = {bound: count for bound, count in zip(bounds, series.counts, strict=True) if count}
    assert sum(counted.values()) == 10
    assert counted[0.1] == 1
    assert counted[0.5] == 2  # 0.4 and 0.5: a bound belongs to its own bucket
    assert found["hpctrain_steps_total"] == {(): 10.0}
    assert found["hpctrain_samples_total"] == {(): 160.0}
    assert found["hpctrain_skipped_steps_total"] == {(): 1.0}
    assert found["hpctrain_loss"] == {(): 0.1}
    assert found["hpctrain_last_step_timestamp_seconds"] == {(): 1010.0}


def test_a_roll_back_counts_the_steps_that_are_done_again_and_no_sample_is_lost_or_counted_twice() -> None:
    metrics = RunMetrics(rank=0)
    metrics.receive(begins(step=100, samples=1600))
    for number in range(101, 106):
        metrics.receive(step(number, samples=16 * number))
    metrics.receive({
        "kind": "roll_back", "time": 1.0, "step": 106, "to_step": 102, "to_samples": 16 * 102, "reason": "",
        "number": 1, "lr_factor": 0.5,
    })  # fmt: skip
    found = values(metrics)
    assert found["hpctrain_step"] == {(): 102}
    assert found["hpctrain_lost_steps_total"] == {(): 3}
    assert found["hpctrain_lost_seconds_total"][()] == pytest.approx(0.3)
    for number in range(103, 106):
        metrics.receive(step(number, samples=16 * number))
    found = values(metrics)
    assert found["hpctrain_samples_total"] == {(): 8 * 16}  # five steps, and three of them again
    assert found["hpctrain_roll_backs_total"] == {(): 1}


def test_checkpoints_evaluations_and_what_goes_wrong() -> None:
    metrics = RunMetrics(rank=0, given=[("hpctrain_start_time_seconds", (), 990.0)])
    metrics.receive(begins())
    assert values(metrics)["hpctrain_startup_seconds"] == {(): 10.0}
    checkpoint = {
        "kind": "checkpoint", "time": 1005.0, "step": 5, "path": "a", "bytes": 1000, "mode": "sync",
        "stall_seconds": 0.25, "write_seconds": 0.5, "mb_per_s": 1.0, "buffer_bytes": 0, "engine": "direct",
        "note": "",
    }  # fmt: skip
    slow = {"time": 1.0, "step": 5, "ranks": [3], "nodes": ["a"], "value": 2.0, "usual": 1.0, "wait_s": 1.0}
    for record in (
        {"kind": "checkpoint_begun", "time": 1.0, "step": 5},
        checkpoint,
        {"kind": "checkpoint_verified", "time": 1.0, "path": "a", "good": True},
        {"kind": "checkpoint_begun", "time": 1.0, "step": 6},
        {"kind": "checkpoint_verified", "time": 1.0, "path": "a", "good": False},
        {"kind": "checkpoint_failed", "time": 1.0, "error": "disk full"},
        {"kind": "checkpoint_skipped", "time": 1.0, "step": 7, "in_flight": 6},
        {"kind": "evaluation", "time": 1.0, "step": 5, "quality": {"accuracy": 0.75}},
        {"kind": "loss_jump", "time": 1.0, "step": 8, "loss": 9.0, "grad_norm": 1.0, "reason": "jumps"},
        {"kind": "out_of_memory", "time": 1.0, "attempt": 1, "micro_batches": 2, "samples": 4},
        {"kind": "out_of_memory", "time": 1.0, "step": 9, "ranks": "0", "micro_batches": 4, "samples": 2},
        {"kind": "slow", "cause": "compute", **slow},
        {"kind": "slow", "cause": "compute", **slow, "value": 3.0},
        {"kind": "slow", "cause": "compute", **slow, "ranks": [4]},
        {"kind": "slow", "cause": "network", **slow},
        {"kind": "slow_ended", "cause": "compute", **slow},
        {"kind": "buckets", "time": 1.0, "step": 9, "steps": 7, "bytes": [10, 20]},
        {"kind": "stopped", "time": 1.0, "reason": "SIGUSR1 on rank 3", "step": 9},
        {"kind": "unheard of"},
    ):
        metrics.receive(record)
    found = values(metrics)
    attempts = {
        what: found[f"hpctrain_checkpoints_{what}_total"][()]
        for what in ("attempted", "committed", "verified", "failed", "skipped")
    }
    assert attempts == {"attempted": 2, "committed": 1, "verified": 1, "failed": 2, "skipped": 1}
    assert found["hpctrain_checkpoint_write_seconds"] == {(): 0.5}
    assert found["hpctrain_last_checkpoint_step"] == {(): 5}
    assert found["hpctrain_evaluation"] == {("accuracy",): 0.75}
    assert found["hpctrain_out_of_memory_total"] == {(): 1}  # the other one was an earlier start's
    assert found["hpctrain_micro_batches"] == {(): 4}
    assert found["hpctrain_slow"]["compute",] == 1
    assert found["hpctrain_slow"]["network",] == 1
    assert found["hpctrain_slow"]["input",] == 0
    assert found["hpctrain_reduced_bytes_total"] == {("0",): 210}
    assert found["hpctrain_stops_total"] == {("signal",): 1, ("time_limit",): 0, ("scaling",): 0}
    assert found["hpctrain_loss_jumps_total"] == {(): 1}


def test_only_rank_0_exposes_the_figures_of_the_run() -> None:
    metrics = RunMetrics(rank=3, probes={"hpctrain_time_left_seconds": lambda: 1.0})
    metrics.receive(begins())
    metrics.receive(step(1, samples=16))
    found = values(metrics)
    assert found
    assert {METRICS[name].scope for name in found} == {Scope.RANK}
    assert {labels[0] for series in found.values() for labels in series} == {"3"}


def test_what_is_not_known_has_no_series() -> None:
    left: list[float | None] = [None, -2.0]
    metrics = RunMetrics(rank=0, probes={"hpctrain_time_left_seconds": lambda: left.pop(0)})
    assert "hpctrain_time_left_seconds" not in values(metrics)
    assert values(metrics)["hpctrain_time_left_seconds"] == {(): -2.0}


def test_energy_adds_up_by_source_and_gpus_have_their_last_values() -> None:
    metrics = RunMetrics(rank=4)
    assert "hpctrain_energy_joules_total" not in values(metrics)
    for joules, load in ((100.0, 0.5), (150.0, None)):
        metrics.receive({
            "kind": "energy", "time": 1000.0, "seconds": 10.0, "step": 1, "total_j": joules,
            "joules": {"RAPL": joules, "NVML": 1.0},
            "devices": [{"index": 0, "utilisation": load, "memory_bytes": 1 << 30}],
        })  # fmt: skip
    found = values(metrics)
    assert found["hpctrain_energy_joules_total"] == {("4", "RAPL"): 250.0, ("4", "NVML"): 2.0}
    assert found["hpctrain_gpu_utilisation_ratio"] == {("4", "0"): 0.5}
    assert found["hpctrain_gpu_memory_bytes"] == {("4", "0"): 1 << 30}
