"""What is noted of an attempt while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch import RankFailure
from hpctrain.supervise.attempt_watch import AttemptWatch
from hpctrain.supervise.ledger import RunProgress
from hpctrain.supervise.nodes import NodeWatch

_START = '{"time": 1795500000.0, "step": 5, "ranks": 2}\n'


@pytest.fixture
def begins() -> list[int]:
    """Step of each call of `training_begins`."""
    return []


def watch_in(directory: Path, *, begins: list[int], start_within_s: float) -> AttemptWatch:
    return AttemptWatch(
        RunProgress(directory, checkpoints=directory / "checkpoints"),
        nodes=NodeWatch([], addresses={}, slurmd_port=6818),
        start_within_s=start_within_s,
        kill_after_s=4.0,
        training_begins=lambda step, _at: begins.append(step),
    )


def test_training_that_begins_in_time_is_told_once(tmp_path: Path, begins: list[int]) -> None:
    watch = watch_in(tmp_path, begins=begins, start_within_s=60.0)
    assert watch.must_end() is None
    (tmp_path / "starts.jsonl").write_text(_START)
    assert watch.must_end() is None
    assert watch.must_end() is None
    watch.saw_line(b"hpctrain: a warning", None)
    assert begins == [5]
    assert watch.log.lines() == ("hpctrain: a warning",)


def test_what_ranks_do_while_they_are_ended_for_a_late_start_does_not_count(
    tmp_path: Path, begins: list[int]
) -> None:
    watch = watch_in(tmp_path, begins=begins, start_within_s=0.0)
    watch.saw_line(b"before", None)
    request = watch.must_end()
    assert request is not None
    assert request.reason == "training does not begin"
    (tmp_path / "starts.jsonl").write_text(_START)
    watch.saw_line(
        b"mpirun noticed that process rank 0 with PID 7 on node vm exited on signal 15 (Terminated).",
        RankFailure(rank="0", node="vm", exit_code=143, signal=15),
    )
    assert watch.must_end() is not None
    watch.look_for_begin()
    assert watch.overdue
    assert begins == []
    assert watch.lost_at is None
    assert watch.log.lines() == ("before",)
