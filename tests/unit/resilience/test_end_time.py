"""Where the end of a run comes from: the recipe, HPCTRAIN_DEADLINE, Slurm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from hpctrain.errors import LaunchError
from hpctrain.resilience import EndTime, WallClock
from hpctrain.resilience.wall_clock import (
    SlurmAnswer,
    ask_again_after_s,
    ask_job_end,
    ends_known_at_start,
    job_to_ask_about,
    parse_deadline,
    parse_ends,
)
from tests.states import wait_for

pytestmark = pytest.mark.timing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1785000000", 1785000000.0),
        ("1785000000.5", 1785000000.5),
        ("2026-07-30T18:00:00+00:00", 1785434400.0),
        ("2026-07-30T18:00:00Z", 1785434400.0),
        ("2026-07-30 18:00:00", datetime(2026, 7, 30, 18).timestamp()),
    ],
)
def test_a_deadline_is_seconds_or_a_time(text: str, expected: float) -> None:
    assert parse_deadline(text) == expected


@pytest.mark.parametrize("text", ["soon", "18:00", "nan", "inf", "2026-13-01T00:00:00"])
def test_another_deadline_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"HPCTRAIN_DEADLINE is .*: write seconds since 1970"):
        parse_deadline(text)


def test_the_recipe_and_the_deadline_are_known_at_the_start() -> None:
    ends = ends_known_at_start({"HPCTRAIN_DEADLINE": "500"}, started_s=100.0, stop_after_s=60.0)
    assert [(end.at_s, end.source) for end in ends] == [
        (160.0, "stop.after_s of the recipe"),
        (500.0, "HPCTRAIN_DEADLINE"),
    ]
    assert ends_known_at_start({}, started_s=100.0, stop_after_s=None) == []


def test_an_end_is_described_with_the_time_that_is_left() -> None:
    at = datetime(2026, 7, 30, 18).timestamp()
    end = EndTime(at_s=at, source="HPCTRAIN_DEADLINE")
    assert end.describe(at - 3540) == "18:00:00, in 59 min (HPCTRAIN_DEADLINE)"
    assert end.describe(at - 5 * 86400) == "2026-07-30 18:00:00, in 5 days (HPCTRAIN_DEADLINE)"
    assert end.describe(at + 1) == "18:00:00, already over (HPCTRAIN_DEADLINE)"


# ---------------------------------------------------------------------- Slurm


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        # The last task of array 7 to start has the array's own number.
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}, "7_1"),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}, "7"),
    ],
)
def test_slurm_is_asked_about_the_task_of_an_array_and_the_first_component(
    environ: dict[str, str], job: str | None
) -> None:
    assert job_to_ask_about(environ) == job


@pytest.mark.parametrize(
    ("text", "end_s"),
    [
        ("1:00 1785000000\n", 1785000000.0),
        ("5:00 1785000300\n7:00 1785000420\n", 1785000300.0),  # of a heterogeneous job the first to end
        ("UNLIMITED 1816536000\n", None),
        ("UNLIMITED 1816536000\n2-00:00:00 1785000000\n", 1785000000.0),
    ],
)
def test_the_earliest_end_of_squeue_counts(text: str, end_s: float | None) -> None:
    assert parse_ends(text) == SlurmAnswer(end_s=end_s)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "does not list the job"),
        ("1:00 N/A\n", "gives 'N/A' as the end"),
        ("1:00 2026-07-30T18:00:00\n", "gives '2026"),
        ("slurm_load_jobs error: no contact\n", "printed 'slurm_load_jobs error: no contact'"),
    ],
)
def test_what_squeue_should_not_print_is_a_problem_in_words(text: str, problem: str) -> None:
    answer = parse_ends(text)
    assert answer.end_s is None
    assert answer.problem is not None
    assert problem in answer.problem


def test_without_squeue_the_problem_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert ask_job_end("7") == SlurmAnswer(problem="squeue cannot be run: No such file or directory")


@pytest.mark.parametrize(
    ("left_s", "again_s"), [(None, 600), (86_400, 600), (6000, 300), (600, 60), (5, 60), (-5, 60)]
)
def test_slurm_is_asked_at_most_once_per_minute(left_s: float | None, again_s: float) -> None:
    assert ask_again_after_s(left_s) == again_s


# ---------------------------------------------------------------------- the clock


@pytest.fixture
def clocks() -> Iterator[list[WallClock]]:
    made: list[WallClock] = []
    yield made
    for clock in made:
        clock.close()


def test_without_an_end_there_is_no_limit_and_no_news() -> None:
    clock = WallClock.start({})
    assert (clock.time_left_s(), clock.end, clock.news()) == (None, None, None)


def test_the_earliest_end_counts_and_is_printed_once(clocks: list[WallClock]) -> None:
    now_s = time.time()
    clock = WallClock(
        [EndTime(at_s=now_s + 900, source="HPCTRAIN_DEADLINE")], ask=lambda: SlurmAnswer(end_s=now_s + 600)
    )
    clocks.append(clock)
    wait_for(lambda: clock.end is not None and clock.end.source != "HPCTRAIN_DEADLINE")
    news = clock.news()
    assert news is not None
    assert news.startswith("time limit: ")
    assert "10 min (Slurm's time limit); the run saves and stops before that" in news
    left_s = clock.time_left_s()
    assert left_s is not None
    assert 580 < left_s <= 600
    assert clock.news() is None


def test_slurms_end_in_the_environment_counts_until_slurm_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no squeue, as in a container
    end_s = int(time.time()) + 3000
    clock = WallClock.start({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(end_s)})
    try:
        assert clock.end == EndTime(at_s=end_s, source="Slurm's time limit")
        assert "50 min (Slurm's time limit)" in wait_for(clock.news)
    finally:
        clock.close()


def test_an_end_that_slurm_does_not_give_is_said_once(clocks: list[WallClock]) -> None:
    clock = WallClock(ask=lambda: SlurmAnswer(problem="squeue did not answer within 20 s"))
    clocks.append(clock)
    assert wait_for(clock.news) == (
        "note: it is not known when Slurm ends this job (squeue did not answer within 20 s); a signal still stops the "
        "run in time"
    )
    assert clock.news() is None
    assert clock.time_left_s() is None


def test_a_changed_limit_is_printed() -> None:
    clock = WallClock(slurm_end_s=time.time() + 600)
    assert "in 10 min" in wait_for(clock.news)
    clock._set_slurm_end(time.time() + 6000)
    assert wait_for(clock.news).startswith("the time limit has changed: ")
    clock._set_slurm_end(None)
    assert clock.time_left_s() is None
