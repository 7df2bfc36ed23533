"""What the checkpoint benchmark makes of its measurements."""

from __future__ import annotations

import pytest

from benchmarks import results_file
from benchmarks.checkpoint import suite as figures
from benchmarks.results_file import figure_of

SAVES = {
    "raw write": [0.4, 0.3, 0.2], "disk, O_DIRECT": [0.4, 0.4, 0.1],
    "save in a run, auto": [0.25, 0.2, 0.05], "save, auto": [0.5, 0.4, 0.1], "save, direct": [0.5, 0.4, 0.1],
    "dcp": [0.8, 0.6, 0.9], "dcp, no fsync": [0.5, 0.8, 0.2], "torch.save": [0.7, 0.7, 0.7],
}  # fmt: skip
SMALL = {"save, auto, many": [0.14, 0.16], "save, auto, few": [0.1, 0.1]}
SMALL_BESIDE = {"save, auto, many": [0.16], "save, auto, few": [0.1], "dcp, many": [0.8], "dcp, few": [0.2]}
LOADS = {"raw read": [0.2, 0.4], "load, verified": [0.25, 0.4], "dcp": [0.5, 0.5]}
COLD = {"raw read": [0.3], "load, verified": [0.5]}
STALLS = {
    "seconds": {"memcpy": [0.1, 0.1], "save async, auto": [0.6, 0.7], "dcp async": [0.9, 0.9]},
    "stalls": {"save async, auto": [0.12, 0.13], "dcp async": [0.3, 0.2]},
    "share": [100, 100],
}
MEMORY = {
    "ours": [{"idle": 100, "peak": 200, "share": 100}, {"idle": 100, "peak": 204, "share": 100}],
    "dcp": [{"idle": 100, "peak": 300, "share": 100}],
}
STEPS = {
    "free": [{"quiet": [0.01, 0.01], "beside": [0.01, 0.02], "save": 0.5}],
    "limited": [{"quiet": [0.01, 0.01], "beside": [0.0105, 0.0105], "save": 2.0}],
    "dcp async": [{"quiet": [0.01], "beside": [0.04], "save": 0.9}],
}
REPLICAS = {
    "save in a run, auto, replicas off": [0.2, 0.1, 0.4],
    "save in a run, auto, replicas sampled": [0.202, 0.1, 0.408],
    "save in a run, auto, replicas full": [0.3, 0.2, 0.5],
}


def all_records() -> list[results_file.Record]:
    return [
        *figures.save_records(SAVES),
        *figures.small_records(SMALL, SMALL_BESIDE, what="10,000 tensors"),
        *figures.other_records(dict.fromkeys(figures.OTHERS, SAVES)),
        *figures.load_records(LOADS, COLD),
        figures.load_with_peers_record(LOADS),
        figures.stall_record(STALLS),
        figures.memory_record(MEMORY),
        *figures.steps_records(STEPS, limit_mb_per_s=100.0),
        figures.replica_record(REPLICAS),
    ]


def test_each_number_is_held_against_its_bar() -> None:
    made = {record.id: record for record in all_records()}
    assert {name: (pytest.approx(record.value), record.holds) for name, record in made.items()} == {
        "checkpoint.1a": (1.6, True),
        "checkpoint.1b": (3.2, True),
        "checkpoint.1c": (4.0, True),
        "checkpoint.1a.new": (0.8, False),  # the rounds' ratios are 0.8, 0.75 and 2
        "checkpoint.1b.new": (1.6, True),
        "checkpoint.1c.new": (2.0, True),
        "checkpoint.1a.limit": (1.0, True),
        "checkpoint.1d": (1.5, True),
        "checkpoint.1d.beside": (1.6, False),
        "checkpoint.1.small": (5.0, True),
        **{f"checkpoint.1.{case}": (4.0, True) for case in figures.OTHERS},
        "checkpoint.2a": (0.9, True),
        "checkpoint.2b": (0.6, False),
        "checkpoint.2c": (1.625, True),  # 0.5 / 0.25 and 0.5 / 0.4
        "checkpoint.3a": (1.25, True),
        "checkpoint.3b": (1.04, True),  # the rank with most
        "checkpoint.3c": (1.5, False),
        "checkpoint.3d": (1.05, True),
        "checkpoint.4a": (1.01, True),  # sampled over off; full has no bar
    }
    assert {figure_of(name) for name in made} == {f"checkpoint.{figure}" for figure in (1, 2, 3, 4)}


def test_where_the_disk_cannot_be_written_to_past_its_cache_there_is_no_such_record() -> None:
    without = {name: seconds for name, seconds in SAVES.items() if name != figures.LIMIT}
    assert {record.id for record in figures.save_records(without)} == {
        f"checkpoint.1{c}{suffix}" for c in "abc" for suffix in ("", ".new")
    }


def test_a_peer_is_neither_raw_writing_nor_a_save_of_ours() -> None:
    (record,) = figures.other_records({"2gib": SAVES})
    assert "the fastest peer (dcp, no fsync)" in record.what


def test_the_tables_are_those_of_the_records() -> None:
    tables = figures.tables({"records": [record.as_json() for record in all_records()]})
    assert set(tables) == {name for name, _ in figures.TABLES.values()} | {"stalls", "memory", "steps"}
    # 512 MiB in a median of 0.3 s; of stalls the median, the least and the most; what a save took of the steps.
    assert "| raw write | 300 | 200 | 400 | 1,790 |" in tables["saves.512mib"]
    assert "| save async, auto | 125.0 | 120.0 | 130.0 | 650 |" in tables["stalls"]
    assert "| free | 10.0 | 15.0 | 50% | 500 | 10 |" in tables["steps"]
    assert "| ours | 0 | 0, 0 |" in tables["memory"]
