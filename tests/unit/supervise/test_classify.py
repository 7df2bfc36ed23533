"""The classifier names the cause of every recorded failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.launch import RankFailure
from hpctrain.supervise.attempt_watch import LogLines
from hpctrain.supervise.classify import AttemptEnd, Evidence, classify

LOGS = sorted((Path(__file__).parents[2] / "fixtures" / "failures").glob("*.log"))


def read_log(path: Path) -> tuple[Evidence, dict[str, str]]:
    """The evidence in a recorded log, and its header: what is known apart from the lines, and what is expected."""
    header: dict[str, str] = {}
    lines = path.read_text().splitlines()
    while lines and lines[0].startswith("# "):
        key, _, value = lines.pop(0).removeprefix("# ").partition(": ")
        header[key] = value
    number = {name: float(header[name]) for name in ("ended", "time_limit", "overdue_s") if name in header}
    names = {
        name: tuple(header.get(name, "").split())
        for name in ("nodes", "silent", "answering", "oom", "signals")
    }
    evidence = Evidence(
        exit_code=None if header["exit_code"] == "none" else int(header["exit_code"]),
        lines=lines,
        nodes=names["nodes"],
        silent_nodes=names["silent"],
        answering_nodes=names["answering"],
        oom_nodes=names["oom"],
        signals=names["signals"],
        **number,
    )
    return evidence, header


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_the_cause_of_a_recorded_failure_is_named(path: Path) -> None:
    evidence, header = read_log(path)
    found = classify(evidence)
    assert found.cause.value == header["cause"], found
    assert " ".join(found.nodes) == header.get("blamed", ""), found
    assert found.reason


def test_there_are_enough_logs_and_each_cause_has_some() -> None:
    headers = [read_log(path)[1] for path in LOGS]
    assert len(headers) >= 30
    assert {header["cause"] for header in headers} == {cause.value for cause in AttemptEnd} - {
        "finished",
        "resized",
    }
    assert all(header["source"] for header in headers)
    assert sum(header["source"].startswith("recorded") for header in headers) >= 15


def test_ranks_that_saved_when_they_were_ended_for_a_late_start_are_a_hang() -> None:
    assert classify(Evidence(exit_code=75, overdue_s=300.0)).cause is AttemptEnd.HANG
    # A signal to the supervisor meanwhile is what the user wants.
    assert classify(Evidence(exit_code=75, overdue_s=300.0, signals=["SIGINT"])).cause is AttemptEnd.CANCELLED


@pytest.mark.parametrize("signals", [(), ("SIGTERM",)])
def test_sigterm_is_a_preemption_where_slurm_says_so_and_else_somebodys_wish(
    signals: tuple[str, ...],
) -> None:
    lines = ["hpctrain: stopped after step 40 of 100 (SIGTERM); the state is saved"]
    for preempted, cause in ((True, AttemptEnd.PREEMPTION), (False, AttemptEnd.CANCELLED)):
        evidence = Evidence(exit_code=75, lines=lines, signals=signals, preempted=preempted)
        assert classify(evidence).cause is cause


@pytest.mark.parametrize(
    "ends",
    [
        "=   KILLED BY SIGNAL: 9 (Killed)",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
    ],
)
def test_of_hydras_ranks_the_one_is_named_that_the_launch_has_found(ends: str) -> None:
    lines = ["=   RANK 0 PID 7 RUNNING AT n018", ends]  # Intel MPI lists all ranks
    first = RankFailure(rank="1", node="n017", exit_code=139, signal=11)
    for failure, said, node in (
        (first, "rank 1 on n017 was ended by signal 11 (SIGSEGV)", "n017"),
        (RankFailure(rank="1", node="n017", exit_code=143), "rank 1 on n017 was ended by a signal", "n017"),
        (None, "a rank was ended by signal 9 (SIGKILL: often ", "n018"),
    ):
        found = classify(Evidence(exit_code=139, lines=lines, failure=failure))
        assert found.cause is AttemptEnd.LOST_RANK
        assert found.reason.startswith(said)
        assert found.nodes == (node,)
    said_nothing = classify(Evidence(exit_code=1, lines=["NameError: name"], failure=first))
    assert said_nothing.cause is not AttemptEnd.LOST_RANK  # Hydra has said nothing of a signal


def test_0_is_a_finished_run_whatever_was_printed() -> None:
    found = classify(Evidence(exit_code=0, lines=["srun: error: hpct0: task 1: Killed"]))
    assert found.cause is AttemptEnd.FINISHED


def test_the_same_error_has_the_same_fingerprint_and_another_has_another() -> None:
    def error(text: str) -> str:
        lines = [f"hpctrain: rank 1 on hpct0: Traceback (most recent call last):\n{text}".splitlines()]
        lines = [*lines[0], "hpctrain: rank 1 ends the run (exit code 1), so that no other rank waits for it"]
        found = classify(Evidence(exit_code=1, lines=lines))
        assert found.cause is AttemptEnd.USER_ERROR
        return found.error

    assert error("ValueError: bad sample 17 at 0x7f00") == error("ValueError: bad sample 4711 at 0x7fab")
    assert error("ValueError: bad sample 17") != error("ValueError: bad label 17")


def test_lines_are_kept_in_order_and_telling_ones_survive_what_is_printed_after_them() -> None:
    log = LogLines()
    log.add(b"hpctrain: rank 1 on hpct0: Traceback (most recent call last):\r")
    log.add("mu \u00b5 \xff".encode("latin-1", "replace"))
    log.add(b"ZeroDivisionError: division by zero")
    for number in range(5000):
        log.add(f"step {number}".encode())
    lines = log.lines()
    assert lines[:2] == (
        "hpctrain: rank 1 on hpct0: Traceback (most recent call last):",
        "ZeroDivisionError: division by zero",
    )
    assert lines[-1] == "step 4999"
    assert len(lines) < 1100
