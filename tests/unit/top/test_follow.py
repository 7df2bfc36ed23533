"""What is read of a run that goes on: only what is new, of the newest start, and never more than a bound."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import UsageError
from hpctrain.top import RunFollower
from hpctrain.top.run_follower import AppendedRecords, SmallFile
from tests.ranks_launcher import REPOSITORY
from tests.unit.report.conftest import STEPS
from tests.unit.top.conftest import RECORDS, lines_of


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def last_time(finished: Path) -> float:
    return float(json.loads(lines_of(finished, 0)[-1])["time"])


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def test_only_whole_new_lines_are_read_and_a_replaced_file_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = AppendedRecords(path, max_bytes=1 << 20)
    assert records.read() == []
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    assert [each["n"] for each in records.read()] == [1, 2]
    assert records.read() == []
    append(path, ': 3}\nno JSON\n[4]\n{"n": 5}\n')
    assert [each["n"] for each in records.read()] == [3, 5]
    new = tmp_path / "new"
    new.write_text('{"n": 6}\n')
    new.replace(path)
    assert [each["n"] for each in records.read()] == [6]
    path.unlink()
    assert records.read() == []


@pytest.mark.parametrize("max_bytes", [100, 109, 1005])
def test_of_a_long_file_only_the_end_is_read(tmp_path: Path, max_bytes: int) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(100_000)))
    records = AppendedRecords(path, max_bytes=max_bytes)
    found = [each["n"] for each in records.read()]
    assert found == list(range(100_000 - len(found), 100_000))
    line = len('{"n": 99999}\n')
    assert max_bytes // line - 1 <= len(found) <= max_bytes // line
    append(path, '{"n": -1}\n')
    assert [each["n"] for each in records.read()] == [-1]


def test_a_small_file_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    file = SmallFile(path)
    assert not file.refresh()
    write(path, {"n": 1})
    assert file.refresh()
    assert file.json() == {"n": 1}
    assert not file.refresh()
    os.utime(path, (1, 1))
    assert file.refresh()
    assert file.modified == 1
    path.unlink()
    assert file.refresh()
    assert file.json() is None


def test_a_run_is_followed_from_before_its_first_step_to_its_end(going_on: Path, finished: Path) -> None:
    now = last_time(finished)
    follower = RunFollower(going_on)
    state = follower.refresh(now=now)
    assert (state.step, state.total_steps, state.loss) == (0, STEPS, None)
    assert state.status.startswith("no step yet")
    lines = [lines_of(finished, rank) for rank in (0, 1)]
    seen = []
    for end in range(7, len(lines[0]), 7):
        for rank, path in enumerate(RECORDS):
            append(going_on / path, "".join(lines[rank][end - 7 : end]))
        append(going_on / RECORDS[0], '{"kind": "step", "ti')
        state = follower.refresh(now=now)
        with (going_on / RECORDS[0]).open("rb+") as file:  # the rank continues the line
            file.truncate(file.seek(0, os.SEEK_END) - 20)
        seen.append(state.step)
    assert len(set(seen)) == len(seen) > 5
    assert sorted(seen) == seen
    assert state.status == "running"
    assert state.num_followed == 2
    assert (state.slowest[0].rank, state.slowest[0].node) == (1, "n1")
    assert state.slowest[0].factor > 1.05
    assert state.to_go_s is not None
    assert state.to_go_s > 0
    shutil.copy(finished / "summary.json", going_on)
    state = follower.refresh(now=now)
    assert (state.status, state.kind, state.to_go_s) == ("finished", "good", None)


def test_a_finished_run_is_read_at_once(finished: Path) -> None:
    state = RunFollower(finished).refresh(now=last_time(finished) + 60)
    assert (state.status, state.step, state.num_ranks, state.num_nodes) == ("finished", STEPS, 2, 2)
    assert state.checkpoint_step == STEPS
    assert state.checkpoint_age_s == pytest.approx(60, abs=5)
    assert state.quality == f"accuracy 0.5 after step {STEPS}"
    assert state.parts_of.startswith("all ranks")
    assert sum(state.parts.values()) == pytest.approx(1)
    assert state.parts["waiting"] > 0  # how much depends on the load
    assert state.step_s is not None
    assert 0.012 <= state.step_s[0] <= state.step_s[1] <= state.step_s[2]
    assert len(state.losses) == STEPS


def test_a_resumed_run_begins_anew_and_its_repeated_steps_count_once(going_on: Path, finished: Path) -> None:
    for rank, path in enumerate(RECORDS):
        (going_on / path).write_text("".join(lines_of(finished, rank)))
    shutil.copy(finished / "summary.json", going_on)
    follower = RunFollower(going_on)
    now = last_time(finished)
    follower.refresh(now=now)
    start = json.loads((going_on / "starts.jsonl").read_text())
    append(going_on / "starts.jsonl", json.dumps({**start, "time": now + 1, "step": 40}) + "\n")
    os.utime(going_on / "starts.jsonl", (now + 1, time.time() + 1))
    state = follower.refresh(now=now + 2)
    assert (state.step, state.status) == (40, "no step yet, for 1 s")
    step = next(
        json.loads(line) for line in lines_of(finished, 0) if '"step": 41' in line and '"loss"' in line
    )
    append(going_on / RECORDS[0], json.dumps({**step, "time": now + 3, "loss": "nan"}) + "\n")
    for state in (follower.refresh(now=now + 4), RunFollower(going_on).refresh(now=now + 4)):
        assert (state.step, state.status, state.num_steps) == (41, "running", 1)
        assert len(state.losses) == 41
        assert state.losses[-1] != state.losses[-1]  # NaN


def test_a_silent_run_and_one_that_was_ended_are_not_called_running(going_on: Path, finished: Path) -> None:
    (going_on / RECORDS[0]).write_text("".join(lines_of(finished, 0)))
    now = last_time(finished)
    follower = RunFollower(going_on)
    assert follower.refresh(now=now + 5).status == "running"
    silent = follower.refresh(now=now + 600)
    assert (silent.status, silent.kind) == ("no record for 10 min", "problem")
    write(going_on / "watch" / "ending.json", {"rank": 1, "host": "n1", "reason": "rank 0 is late"})
    assert follower.refresh(now=now).status == "ended by rank 1 on n1: rank 0 is late"


def test_what_is_slow_short_of_memory_or_was_restarted_is_shown(going_on: Path, finished: Path) -> None:
    (going_on / RECORDS[0]).write_text("".join(lines_of(finished, 0)))
    slow = {"ranks": [1], "nodes": ["n1"], "cause": "compute", "value": 0.12, "usual": 0.04, "wait_s": 0.08}
    write(going_on / "slow.json", {"step": 50, "slow": [slow]})
    write(going_on / "micro-batch.json", {"samples": 6})
    section = {"limit_s": 600.0, "derived_s": 3.0, "slowest_s": 0.02, "measured": 40}
    write(going_on / "limits.json", {"sections": {"step": section, "save": {**section, "measured": 0}}})
    shutil.copy(REPOSITORY / "tests" / "fixtures" / "slurm" / "attempts.jsonl", going_on)
    append(
        going_on / RECORDS[0],
        json.dumps({"kind": "slow", "time": last_time(finished), "step": 50, **slow}) + "\n",
    )
    state = RunFollower(going_on).refresh(now=last_time(finished))
    assert state.notes == [
        "slow now: compute of ranks 1 on n1: 120 ms, usual 40; the others wait 80 ms per step",
        "micro-batches of at most 6 samples, since memory ran out",
        "time limits of waits: step 3 s",
    ]
    assert len(state.attempts) == 3
    assert state.incidents[-1][1].startswith("slow, step 50: ranks 1, nodes n1, cause compute, value 0.12")


def test_the_wall_clock_that_is_left_is_the_nearest_known_end(going_on: Path) -> None:
    start = json.loads((going_on / "starts.jsonl").read_text())
    began = float(start["time"])
    assert RunFollower(going_on).refresh(now=began).left_s is None
    start["recipe"]["stop"]["after_s"] = 100.0
    write(going_on / "starts.jsonl", start)
    append(going_on / "starts.jsonl", "\n")
    assert RunFollower(going_on).refresh(now=began + 30).left_s == pytest.approx(70)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist: give the directory of a run"):
        RunFollower(tmp_path / "none")
    with pytest.raises(UsageError, match=r"has no starts\.jsonl"):
        RunFollower(tmp_path)
