"""What an attempt has achieved, from the files of the run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.supervise.ledger import RunProgress


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "watch").mkdir()
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def progress_of(run: Path) -> RunProgress:
    return RunProgress(run, checkpoints=run / "checkpoints")


def add(path: Path, *records: dict[str, object]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step(number: int) -> dict[str, object]:
    return {"kind": "step", "time": 1.0, "step": number}


def start(number: int) -> dict[str, object]:
    # As `hpctrain/run/training.py` writes it; the recipe may hold a `step` of its own.
    return {
        "time": 1795500000.25,
        "step": number,
        "recipe": {"step": 77},
        "environment": {"ranks": ["x" * 200] * 400},
    }


def test_an_empty_run_directory_says_nothing(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path / "run", checkpoints=tmp_path / "run" / "checkpoints")
    assert progress.first_step() is None
    assert progress.last_step() is None
    assert progress.newest_checkpoint() is None
    assert progress.announced_ending() is None


def test_only_what_was_added_since_belongs_to_the_attempt(run: Path) -> None:
    add(run / "starts.jsonl", start(0))
    add(run / "metrics" / "rank-00000.jsonl", step(1), step(2))
    progress = progress_of(run)
    assert progress.first_step() is None
    assert progress.last_step() is None
    add(run / "starts.jsonl", start(40))
    assert progress.first_step() == 40
    add(run / "metrics" / "rank-00000.jsonl", step(41), step(42), {"kind": "checkpoint", "step": 42})
    with (run / "metrics" / "rank-00000.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # a rank that was killed while it wrote
    assert progress.last_step() == 42
    everything = RunProgress.of_all(run, checkpoints=run / "checkpoints")
    assert everything.first_step() == 40
    assert everything.last_step() == 42


def test_files_that_were_moved_away_and_begun_anew_are_read_from_their_begin(run: Path) -> None:
    add(run / "starts.jsonl", start(0), start(40))
    add(run / "metrics" / "rank-00000.jsonl", *map(step, range(200)))
    progress = progress_of(run)
    for name in ("starts.jsonl", "metrics/rank-00000.jsonl"):
        (run / name).rename(run / "moved")
    add(run / "starts.jsonl", start(0))
    add(run / "metrics" / "rank-00000.jsonl", step(1))
    assert progress.first_step() == 0
    assert progress.last_step() == 1


def test_the_end_of_a_long_file_is_enough(run: Path) -> None:
    progress = progress_of(run)
    add(run / "metrics" / "rank-00000.jsonl", *map(step, range(1, 5001)))
    assert (run / "metrics" / "rank-00000.jsonl").stat().st_size > 1 << 17
    assert progress.last_step() == 5000


def test_the_newest_finished_checkpoint_counts_and_no_partial_one(run: Path) -> None:
    for name in ("step-00000040.h5", "step-00000050.h5", ".step-00000060.h5.partial-0123456789abcdef"):
        (run / "checkpoints" / name).touch()
    assert progress_of(run).newest_checkpoint() == 50


def test_an_announced_ending_counts_if_it_is_new(run: Path) -> None:
    def announce(rank: int) -> None:
        ending = {
            "rank": rank,
            "host": "hpct0",
            "written": 1.0,
            "leave_at": 2.0,
            "reason": "it has waited 6.0 s for x",
        }
        (run / "watch" / "new").write_text(json.dumps(ending))
        (run / "watch" / "new").rename(run / "watch" / "ending.json")

    announce(0)
    progress = progress_of(run)
    assert progress.announced_ending() is None
    announce(3)
    assert progress.announced_ending() == "hpctrain: rank 3 on hpct0 ends the run: it has waited 6.0 s for x"
