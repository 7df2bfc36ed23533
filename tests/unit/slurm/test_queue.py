"""What squeue and sacct printed, as jobs. Recorded from Slurm 22.05.8 (sacct with slurmdbd on MariaDB 10.11)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch import parse_duration
from hpctrain.slurm import newest_job
from hpctrain.slurm.jobs import (
    Job,
    Submission,
    explain_reason,
    parse_sacct,
    parse_squeue,
    record_path,
    record_submission,
)

RUNNING = "1|RUNNING|None|0:05|10:00|9:55|2|2026-11-24T07:11:46|hpct[0-1]\n"
QUEUED_AGAIN = "1|PENDING|BeginTime|0:00|10:00|10:00|2|2026-11-24T07:12:04|\n"
ARRAY = """1|COMPLETED|None|0:12|10:00|9:48|2|2026-11-24T07:12:04|hpct[0-1]
2_0|COMPLETED|None|0:03|10:00|9:57|1|2026-11-24T07:12:23|hpct0
2_1|PENDING|JobArrayTaskLimit|0:00|10:00|10:00|1|N/A|
2_2|PENDING|JobArrayTaskLimit|0:00|10:00|10:00|1|N/A|
"""
REQUEUED = """1|REQUEUED|0:0|2026-11-24T07:11:46|2026-11-24T07:11:53|00:00:07|2|hpct[0-1]
1|COMPLETED|0:0|2026-11-24T07:12:04|2026-11-24T07:12:16|00:00:12|2|hpct[0-1]
"""
ARRAY_BEFORE = """2_0|COMPLETED|0:0|2026-11-24T07:12:23|2026-11-24T07:12:26|00:00:03|1|hpct0
2_[1-2%1]|PENDING|0:0|Unknown|Unknown|00:00:00|1|None assigned
"""
CANCELLED = "2_2|CANCELLED by 0|0:0|2026-11-24T07:12:32|2026-11-24T07:12:33|00:00:01|1|hpct0\n"


def test_a_running_job_has_its_time_left_and_its_nodes() -> None:
    assert parse_squeue(RUNNING) == [
        Job(
            job_id="1", state="RUNNING", elapsed_s=5, limit_s=600, left_s=595, num_nodes=2, node_list="hpct[0-1]",
            start="2026-11-24T07:11:46",
        )
    ]  # fmt: skip


def test_a_job_that_was_queued_again_waits_with_a_reason_and_an_expected_start() -> None:
    (job,) = parse_squeue(QUEUED_AGAIN)
    assert (job.waits, job.ended, job.reason, job.start) == (True, False, "BeginTime", "2026-11-24T07:12:04")


def test_tasks_of_an_array_are_jobs_of_their_own() -> None:
    jobs = parse_squeue(ARRAY)
    assert [job.job_id for job in jobs] == ["1", "2_0", "2_1", "2_2"]
    assert [job.ended for job in jobs] == [True, True, False, False]
    assert jobs[2].start is None


def test_sacct_lists_each_attempt_of_a_job() -> None:
    first, second = parse_sacct(REQUEUED)
    assert (first.state, first.elapsed_s, first.node_list) == ("REQUEUED", 7, "hpct[0-1]")
    assert (second.state, second.exit_code, second.end) == ("COMPLETED", 0, "2026-11-24T07:12:16")
    assert [job.state for job in parse_sacct(ARRAY_BEFORE)] == ["COMPLETED", "PENDING"]
    assert [job.state for job in parse_sacct(CANCELLED)] == ["CANCELLED"]


def test_the_job_to_report_is_the_one_that_runs_or_else_the_next_or_else_the_last() -> None:
    def job(number: int, state: str) -> Job:
        return Job(job_id=str(number), state=state)

    old, runs, waits = job(1, "FAILED"), job(2, "RUNNING"), job(3, "PENDING")
    assert newest_job([old, runs, waits], None) == runs
    assert newest_job([old, waits], None) == waits
    assert newest_job([old], None) == old
    assert newest_job([], [old, job(1, "COMPLETED")]) == job(1, "COMPLETED")
    assert newest_job([], None) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:05", 5),
        ("10:00", 600),
        ("1:02:03", 3723),
        ("2-03:04:05", 183845),
        ("UNLIMITED", None),
        ("INVALID", None),
    ],
)
def test_durations_of_squeue(text: str, seconds: int | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("Priority", "higher priority"),
        ("ReqNodeNotAvail, UnavailableNodes:a,b", "shorter slurm.time"),
        ("QOSMaxJobsPerUserLimit", "limit of the account or QOS"),
        ("AssocGrpCPUMinutesLimit", "limit of the account or QOS"),
        ("DependencyNeverSatisfied", "will never start: cancel it"),
    ],
)
def test_reasons_are_explained(reason: str, meaning: str) -> None:
    assert meaning in str(explain_reason(reason))


def test_an_unknown_reason_is_left_as_it_is() -> None:
    assert explain_reason("SomethingNew") is None


def test_a_job_that_cannot_be_recorded_on_a_full_disk_is_an_error(tmp_path: Path) -> None:
    path = record_path(tmp_path)
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    submission = Submission(
        job_id="7", by="submit", script="job.sbatch", recipe="recipe.toml", overrides=(), folder=".", nodes=1,
        tasks_per_node=1, is_array=False, is_shrinkable=False,
    )  # fmt: skip

    with pytest.raises(OSError, match="No space left"):
        record_submission(tmp_path, submission)
