"""What a run directory records of earlier starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.run.metrics_out import (
    figures_of_starts,
    read_figures_of_starts,
    what_the_last_start_left,
)


def steps(*numbers: int, seconds: float = 0.5) -> list[dict[str, Any]]:
    return [{"kind": "step", "step": number, "seconds": {"step": seconds}} for number in numbers]


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_steps_beyond_the_checkpoint_are_lost(tmp_path: Path) -> None:
    records = written(tmp_path / "records", [*steps(*range(1, 9)), *steps(9, 10, seconds=1.5)])
    assert what_the_last_start_left(records, step=8) == {"stopped": None, "lost_steps": 2, "lost_s": 3.0}
    assert what_the_last_start_left(records, step=10) == {"stopped": None, "lost_steps": 0, "lost_s": 0.0}


@pytest.mark.parametrize(
    ("reason", "expected"), [("SIGUSR1 on rank 3", "signal"), ("Slurm's time limit", "time_limit")]
)
def test_a_stop_is_told_from_a_death(tmp_path: Path, reason: str, expected: str) -> None:
    stopped = {"kind": "stopped", "reason": reason}
    records = written(tmp_path / "records", [*steps(1, 2), stopped])
    assert what_the_last_start_left(records, step=2)["stopped"] == expected
    later = written(tmp_path / "later", [*steps(1, 2), stopped, *steps(3)])
    assert what_the_last_start_left(later, step=2) == {"stopped": None, "lost_steps": 1, "lost_s": 0.5}


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    records = written(tmp_path / "records", steps(*range(1, 40_001)))
    assert records.stat().st_size > 2 << 20
    assert what_the_last_start_left(records, step=39_990)["lost_steps"] == 10
    # More is lost than the end of the file tells: the rest is taken to have been as fast.
    assert what_the_last_start_left(records, step=10) == {
        "stopped": None,
        "lost_steps": 39_990,
        "lost_s": 0.5 * 39_990,
    }


def test_nothing_is_lost_in_a_first_start(tmp_path: Path) -> None:
    records = written(tmp_path / "records", [])
    assert what_the_last_start_left(records, step=0) == {"stopped": None, "lost_steps": 0, "lost_s": 0.0}


def start(stopped: str | None = None, *, lost: int = 0) -> dict[str, Any]:
    return {"step": 1, "before": {"stopped": stopped, "lost_steps": lost, "lost_s": 2.0 * lost}}


def test_starts_and_attempts_add_up() -> None:
    starts = [start(), start("signal"), start(lost=3), start("signal", lost=1), {"step": 1, "before": None}]
    found = {(name, *labels): value for name, labels, value in figures_of_starts(starts, [], requeues=2)}
    assert found == {
        ("hpctrain_starts_total",): 5,
        ("hpctrain_resumes_attempted_total",): 4,
        ("hpctrain_resumes_completed_total",): 4,
        ("hpctrain_requeues_total",): 2,
        ("hpctrain_lost_steps_total",): 4,
        ("hpctrain_lost_seconds_total",): 8.0,
        ("hpctrain_stops_total", "signal"): 2,
    }


def test_a_supervisor_knows_the_attempts_that_never_came_to_training(tmp_path: Path) -> None:
    written(tmp_path / "starts.jsonl", [start(), start(lost=2)])
    attempts = [
        {"number": 1, "training_began": 10.0, "ended": 20.0, "cause": "lost node"},
        {"number": 2, "training_began": None, "ended": 30.0, "cause": "lost node"},
        {"number": 3, "training_began": None, "ended": 40.0, "cause": "user error"},
        {"number": 4, "training_began": None, "ended": None, "cause": None},
    ]
    written(tmp_path / "attempts.jsonl", attempts)
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"torn')
    found = {(name, *labels): value for name, labels, value in read_figures_of_starts(tmp_path)}
    assert found["hpctrain_resumes_attempted_total",] == 3
    assert found["hpctrain_resumes_completed_total",] == 1  # this one
    assert found["hpctrain_failed_attempts_total", "lost node"] == 2
    assert found["hpctrain_failed_attempts_total", "user error"] == 1
    assert found["hpctrain_lost_steps_total",] == 2
