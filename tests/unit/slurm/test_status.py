"""What a run directory says of a run, and how it is told together with what Slurm says."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import LaunchError, UsageError
from hpctrain.slurm import Job, Progress, RunStatus, describe_status, find_run, read_progress
from hpctrain.slurm.jobs import recorded_ids
from hpctrain.slurm.status import describe_ledger
from hpctrain.supervise import read_attempts
from hpctrain.telemetry import RecordWriter, write_json
from tests.ranks_launcher import REPOSITORY

NOW = 1_800_000_000.0
# The ledger of a run of two ranks: killed at step 18, then a bug of the user's, then trained to the end.
LEDGER = REPOSITORY / "tests" / "fixtures" / "slurm" / "attempts.jsonl"
CHECKPOINT = REPOSITORY / "tests" / "fixtures" / "checkpoint-v2" / "step-00000007.h5"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that began at step 0, and again at step 100, 60 s ago; two steps per second since then."""
    starts = RecordWriter(tmp_path / "starts.jsonl")
    for time, step, job in ((NOW - 500, 0, "3"), (NOW - 60, 100, "3")):
        variables = {"SLURM_JOB_ID": job}
        starts.write(
            {"time": time, "step": step, "total_steps": 1000, "environment": {"variables": variables}}
        )
    starts.close()
    (tmp_path / "metrics").mkdir()
    steps = RecordWriter(tmp_path / "metrics" / "rank-00000.jsonl")
    for step in range(1, 130):  # of the first start, which was killed
        steps.write(record(step, time=NOW - 500 + step))
    for step in range(101, 201):
        steps.write(record(step, time=NOW - 52 + (step - 100) / 2))
    steps.write({"kind": "checkpoint", "time": NOW, "step": 200})
    steps.close()
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(CHECKPOINT, tmp_path / "checkpoints")
    return tmp_path


def record(step: int, *, time: float) -> dict[str, Any]:
    return {"kind": "step", "time": time, "step": step, "global_samples": 64 * step, "loss": 0.5}


def test_speed_and_steps_are_those_of_the_newest_start(run: Path) -> None:
    with (run / "metrics" / "rank-00000.jsonl").open("a") as file:
        file.write('{"kind": "step", "ti')  # being written now
    found = read_progress(run)
    assert (found.num_starts, found.step, found.total_steps, found.job_id) == (2, 200, 1000, "3")
    assert found.steps_per_s == pytest.approx(2)
    assert found.samples_per_s == pytest.approx(128)
    assert found.seconds_to_go == pytest.approx(400)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 7
    assert found.status is None


def test_only_the_end_of_long_records_is_read(run: Path) -> None:
    path = run / "metrics" / "rank-00000.jsonl"
    with path.open("a") as file:
        for step in range(201, 3000):
            file.write(json.dumps(record(step, time=NOW + step)) + "\n")
    assert path.stat().st_size > 3 * (64 << 10)
    found = read_progress(run)
    assert (found.step, found.steps_per_s) == (2999, pytest.approx(1))


def test_a_start_that_has_made_no_step_yet_is_where_it_resumed(run: Path) -> None:
    starts = RecordWriter(run / "starts.jsonl")
    starts.write({"time": NOW + 10, "step": 150, "total_steps": 1000})
    starts.close()
    found = read_progress(run)
    assert (found.step, found.steps_per_s, found.num_starts) == (150, None, 3)


def test_a_damaged_checkpoint_is_passed_over_and_named(run: Path) -> None:
    damaged = bytearray(CHECKPOINT.read_bytes())
    damaged[len(damaged) - 2000 :] = bytes(2000)
    (run / "checkpoints" / "step-00000009.h5").write_bytes(damaged)
    found = read_progress(run)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 7
    assert len(found.damaged) == 1
    assert "step-00000009.h5" in found.damaged[0]


def test_how_a_run_ended_is_of_the_newest_start_only(run: Path) -> None:
    write_json(run / "summary.json", {"status": "stopped"})
    os.utime(run / "summary.json", (NOW - 400, NOW - 400))
    assert read_progress(run).status is None
    os.utime(run / "summary.json", (NOW, NOW))
    assert read_progress(run).status == "stopped"


def test_a_run_that_has_not_begun_has_no_progress(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "not there") == Progress()


def test_records_that_cannot_be_read_are_an_error(run: Path) -> None:
    (run / "starts.jsonl").write_text("not json\n")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_progress(run)
    (run / "slurm").mkdir()
    (run / "slurm" / "jobs.jsonl").write_text("{\n")
    with pytest.raises(LaunchError, match=r"jobs\.jsonl cannot be read"):
        recorded_ids(run)


def test_a_folder_that_is_no_run_is_refused(run: Path, tmp_path: Path) -> None:
    assert find_run(run) == (run, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="is not the directory of a run"):
        find_run(tmp_path / "empty")


def told(job: Job | None, progress: Progress, attempts: list[Job] | None = None) -> list[str]:
    status = RunStatus(name="digits", run_directory="runs/x", job=job, attempts=attempts, progress=progress)
    return describe_status(status, now=NOW)


def test_a_running_job_is_told_with_its_speed_and_whether_its_time_suffices(run: Path) -> None:
    job = Job(
        job_id="3", state="RUNNING", elapsed_s=60, limit_s=3600, left_s=3540, num_nodes=2, node_list="n[0-1]"
    )
    progress = read_progress(run)
    attempts = [
        Job(job_id="3", state="REQUEUED", elapsed_s=400),
        Job(job_id="3", state="RUNNING", elapsed_s=60),
    ]
    lines = told(job, progress, attempts)
    assert lines[:3] == [
        "digits: job 3 RUNNING, on n[0-1], 59 min left of its 60 min",
        "  step 200 of 1,000, 2 steps/s, 128 samples/s, loss 0.5000, 2 s ago",
        "  6 min to go at this speed, within the time limit",
    ]
    assert lines[3].startswith("  newest good checkpoint: step 7, ")
    assert lines[4] == "  training began 2 times; attempts: REQUEUED after 6 min, RUNNING after 60 s"
    short = Job(job_id="3", state="RUNNING", limit_s=3600, left_s=100, num_nodes=2)
    assert "  6 min to go at this speed, 5 min more than the job has left" in told(short, progress)


def test_a_waiting_job_is_told_with_its_reason() -> None:
    job = Job(job_id="3", state="PENDING", reason="Resources", num_nodes=1, start="2027-01-15T08:00:00")
    assert told(job, Progress()) == [
        "digits: job 3 PENDING, 1 node asked for, expected to start at 2027-01-15 08:00:00",
        "  waits: Resources: it is next, and waits until enough nodes are free",
        "  no step yet",
        "  no checkpoint yet",
        "  training began 0 times (no accounting database: attempts that ended before training began are not known)",
    ]


def test_an_ended_job_is_told_with_how_the_run_ended() -> None:
    job = Job(job_id="3", state="FAILED", exit_code=75)
    assert (
        told(job, Progress(status="stopped"))[0] == "digits: job 3 FAILED, exit code 75, the run is stopped"
    )
    assert told(None, Progress())[0] == "digits: no job that Slurm still knows; the run is not finished"


def supervised(run: Path, *, until: int) -> RunStatus:
    """With the first attempts of the recorded ledger; the last of them may not have ended yet."""
    lines = LEDGER.read_text().splitlines()[:until]
    (run / "attempts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return RunStatus(
        name="digits", run_directory=str(run), job=None, attempts=None, progress=read_progress(run),
        ledger=read_attempts(run),
    )  # fmt: skip


def test_the_supervisors_attempts_are_told_with_their_causes_and_the_effective_time(run: Path) -> None:
    status = supervised(run, until=3)
    assert describe_status(status, now=NOW)[-4:] == [
        "  supervisor: 3 attempts, effective training time 26% of 91 s",
        "    attempt 1: lost rank after 33 s, steps 0 to 14, blamed: vm: rank 1 on vm was ended by signal 9 (SIGKILL: "
        "often from the kernel, out of memory, or from the scheduler)",
        "    attempt 2: user error after 27 s, steps 15 to 29: KeyError: 'label'",
        "    attempt 3: finished after 31 s, steps 30 to 60: the command ended with 0",
    ]
    found = json.loads(json.dumps(status.to_json()))
    assert [attempt["cause"] for attempt in found["ledger"]] == ["lost rank", "user error", "finished"]
    assert found["effective_time"]["share"] == pytest.approx(0.26, abs=0.005)


def test_an_attempt_that_runs_and_one_that_did_not_come_to_training_are_told_too(run: Path) -> None:
    first, *_ = supervised(run, until=1).ledger
    lost = replace(first, steps_lost=3, training_began=None, first_step=None)
    running = replace(
        first, number=2, began=NOW - 10, ended=None, last_step=None, cause=None, reason="", blamed=()
    )
    assert describe_ledger([lost, running], now=NOW)[1:] == [
        "  attempt 1: lost rank after 33 s, no training, 3 lost, blamed: vm: " + first.reason,
        "  attempt 2: runs for 10 s, from step 0",
    ]
    assert describe_ledger([running], now=NOW)[0] == "supervisor: 1 attempt"
    many = [replace(first, number=number) for number in range(1, 16)]
    lines = describe_ledger(many, now=NOW)
    assert len(lines) == 12
    assert lines[1] == "  the last 10:"
    assert lines[2].startswith("  attempt 6: ")
    assert describe_ledger([], now=NOW) == []


def test_a_run_without_a_supervisor_has_no_ledger(run: Path) -> None:
    status = supervised(run, until=0)
    assert not any("supervisor" in line for line in describe_status(status, now=NOW))
    assert status.to_json()["effective_time"] is None
