"""What is computed from starts that were measured, and the page of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results_file import Record
from benchmarks.start.paths import Operations, count
from benchmarks.start.ranks import INIT, LEFT
from benchmarks.start.runs import (
    CLIENTS,
    NOTHING,
    RANKS,
    SERVER,
    UP,
    WITHOUT,
    Compared,
    Epoch,
    Launches,
    Memory,
    results_of,
)
from benchmarks.start.suite import (
    epoch_records,
    further_rank,
    measured,
    memory_records,
    path_records,
    processor_records,
    quartiles,
    tables,
)
from benchmarks.starting import LAUNCH, REPOSITORY

# A process that leaves a child behind, which uses half a second of processor time, in a session of its own.
ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    while time.process_time() < 0.5:
        pass
    os._exit(0)
os._exit(7)
"""


def compared(num_ranks: int, *, differing: tuple[str, ...] = ()) -> Compared:
    return Compared(
        num_ranks=num_ranks,
        seconds={WITHOUT: [8.0, 10.0, 30.0], NOTHING: [4.0, 2.0, 10.0], UP: [1.0, 2.0, 3.0]},
        differing=differing,
        loss="1.0344",
        num_runs=9,
        num_records=48,
    )


def by_id(records: list[Record]) -> dict[str, Record]:
    return {record.id: record for record in records}


def as_read(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Returns records as the page gets them from the file."""
    return [json.loads(json.dumps(record.as_json())) for record in records]


def test_ratios_are_of_rounds_and_those_with_goals_have_them() -> None:
    records = by_id(epoch_records([compared(1), compared(2), compared(8), compared(48)]))
    assert records["start.1.nothing.8"].value == 3.0  # of 2, 5 and 3
    assert records["start.1.nothing.8"].range == (2.0, 5.0)
    assert records["start.1.up.8"].value == 8.0
    bars = {name: record.bar for name, record in records.items()}
    assert bars == {
        "start.1.nothing.1": 1, "start.1.nothing.2": 1, "start.1.nothing.8": 3, "start.1.nothing.48": 8,
        "start.1.up.1": 1, "start.1.up.2": 2.5, "start.1.up.8": 6, "start.1.up.48": 1, "start.5": 0,
    }  # fmt: skip
    assert not records["start.1.nothing.48"].holds
    assert records["start.5"].holds


def test_a_run_that_differs_fails_figure_5() -> None:
    records = by_id(epoch_records([compared(1), compared(2, differing=("with one, round 2",))]))
    assert records["start.5"].value == 1
    assert not records["start.5"].holds
    made = tables({"records": as_read(records.values())})["epochs"]
    assert "| 1 of 9 | 1.0344 |" in made


def test_results_are_equal_to_the_last_digit_but_for_times(tmp_path: Path) -> None:
    def epoch(name: str, *, loss: float, time: float) -> Epoch:
        records = [
            {"kind": "step", "step": 1, "time": time, "loss": loss, "seconds": {"step": time}},
            {"kind": "evaluation", "step": 1, "time": time, "quality": {"loss": loss}},
            {"kind": "efficiency", "step": 1, "time": time, "step_s": time},
        ]
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return Epoch(seconds=time, last_line=("1.0", "0.5"), results=[results_of(tmp_path / name)])

    first = epoch("a", loss=0.1, time=1.0)
    assert len(first.results[0]) == 2
    assert first.equals(epoch("b", loss=0.1, time=2.0))
    assert not first.equals(epoch("c", loss=0.1 + 2**-53, time=1.0))


def test_a_further_rank_is_the_slope_of_each_round() -> None:
    without = {2: [5.0, 6.0], 4: [9.0, 10.0], 8: [17.0, 18.0]}
    forked = {2: [3.1, 3.0], 4: [3.3, 3.4], 8: [3.7, 4.2]}
    assert further_rank(without) == pytest.approx([2.0, 2.0])
    left = {num_ranks: [2 * seconds for seconds in rounds] for num_ranks, rounds in forked.items()}
    (record,) = processor_records(
        {INIT: {WITHOUT: without, NOTHING: forked}, LEFT: {WITHOUT: without, NOTHING: left}}
    )
    assert record.value == pytest.approx(0.15)
    assert not record.holds
    made = tables({"records": as_read([record])})["processor"]
    assert "| each further rank | 2.00 (2.00 to 2.00) | 0.150 (0.125 to 0.175) |" in made
    assert "| 2.00 (2.00 to 2.00) | 0.300 (0.250 to 0.350) |" in made


def test_quartiles() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 3.0, 4.0]
    assert quartiles([2.5]) == [2.5, 2.5, 2.5]


def test_only_paths_of_the_environment_are_counted() -> None:
    trace = [
        '10 execve("/env/bin/python", ["python"], 0x7ffc /* 9 vars */) = 0',
        '10 openat(AT_FDCWD</home/me>, "/env/lib/a.so", O_RDONLY|O_CLOEXEC) = 3</env/lib/a.so>',
        '10 newfstatat(3</env/lib/a.so>, "", {st_mode=S_IFREG|0644, ...}, AT_EMPTY_PATH) = 0',
        '10 openat(AT_FDCWD</home/me>, "/env/lib/b.so", O_RDONLY) = -1 ENOENT (No such file or directory)',
        '11 openat(4</env/lib>, "c", O_RDONLY <unfinished ...>',
        "11 <... openat resumed>) = 5</env/lib/c>",
        "11 getdents64(5</env/lib/c>, 0x55d0 /* 3 entries */, 32768) = 80",
        '11 stat("/environment/x", {st_mode=S_IFREG|0644, ...}) = 0',
        '11 readlink("../env/lib", 0x7ffd, 4096) = -1 EINVAL (Invalid argument)',
        "11 +++ exited with 0 +++",
    ]
    found = count(trace, roots=["/env"], directory=Path("/home"))
    assert found == Operations(count=6, by_process=[3, 3])


def test_paths_and_memory_are_compared_with_one_process_and_with_the_start_without() -> None:
    operations = {
        WITHOUT: {
            1: Operations(count=1000, by_process=[1000]),
            8: Operations(count=8000, by_process=[1000] * 8),
        },
        NOTHING: {
            1: Operations(count=990, by_process=[950, 40]),
            8: Operations(count=1300, by_process=[950, 40]),
        },
    }
    (found,) = path_records(operations)
    assert found.value == 1.3
    assert not found.holds
    without = Memory(pss={RANKS: 1_000_000_000}, numbers={RANKS: 8})
    forked = Memory(
        pss={RANKS: 400_000_000, SERVER: 90_000_000, CLIENTS: 10_000_000}, numbers={RANKS: 8, SERVER: 1, CLIENTS: 8}
    )  # fmt: skip
    (memory,) = memory_records({WITHOUT: [without], NOTHING: [forked]}, num_ranks=8, steps=50)
    assert memory.value == 0.5
    assert memory.holds
    made = tables({"records": as_read([found, memory])})
    assert "| 8 | 8,000 | 1,300 | 950 | 6.15 |" in made["paths"]
    assert "| server |  | 90.0 (1) |" in made["memory"]


def test_a_server_is_kept_for_the_second_launch_and_ends_with_it() -> None:
    launches = Launches(key="k")
    lines = {
        kind: launches.argv(kind, ["x"], num_ranks=3)[-7:] for kind in (NOTHING, UP)
    }  # KEY SECONDS -n 3 -- x
    assert lines[NOTHING][1:3] == ["k", "120.0"]
    assert lines[UP][1:3] == ["k", "0.0"]
    assert launches.argv(WITHOUT, ["x"], num_ranks=3) == [*LAUNCH, "-n", "3", "--no-fork-server", "--", "x"]


def test_the_page_says_whether_the_machine_was_busy() -> None:
    content: dict[str, Any] = {"date": "2026-01-01", "seed": 37, "load": [0.1, 3.0], "machine": {"cores": 2}}
    assert "busy with" not in measured(content)
    assert "**The machine was busy" in measured({**content, "load": [1.5, 3.0]})


def test_the_time_of_processes_whose_parents_have_ended_counts(tmp_path: Path) -> None:
    result = tmp_path / "usage.json"
    argv = [sys.executable, "-m", "benchmarks.start.usage", str(result), sys.executable, "-c", ORPHAN]
    subprocess.run(argv, cwd=REPOSITORY, check=True, timeout=300)
    found = json.loads(result.read_text())
    assert found["code"] == 7
    assert found["left"] == []
    assert found["cpu_s"] >= 0.5
