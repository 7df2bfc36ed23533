"""The quick run: its plan, what a failed part leaves, and the pages of the headline figures. No ranks are started."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import headlines, results_file
from benchmarks.harness import Bench
from benchmarks.headlines import HEADLINES, page_tables, readme_table, refresh, values_of
from benchmarks.quick import __main__ as quick
from benchmarks.quick.parts import PARTS, Part, kept, scaling_records
from benchmarks.results_file import Record, Run
from benchmarks.starting import REPOSITORY
from tests.unit.benchmarks.records import record

MACHINE = {"processor": "p", "cores": 2, "memory_gb": 4, "kernel": "6"}
ABOUT = {
    "machine": MACHINE,
    "versions": {},
    "commit": "0123456789",
    "date": "2026-01-02 03:04 UTC",
    "load": 0.1,
}
DATA = next(part for part in PARTS if part.name == "data")


def records_of(part: Part) -> list[Record]:
    return [record(name) for name in part.ids]


def test_the_parts_have_ten_minutes_and_every_headline_figure() -> None:
    assert sum(part.budget_s for part in PARTS) <= 60 * quick.MINUTES
    assert sorted(name for part in PARTS for name in part.ids) == sorted(one.id for one in HEADLINES)
    # The cluster is up only for those that come first.
    assert [part.on_cluster for part in PARTS] == sorted((part.on_cluster for part in PARTS), reverse=True)


def test_the_headline_figures_are_those_of_the_long_benchmarks() -> None:
    long = headlines.read_results(REPOSITORY / "benchmarks" / "results")
    for headline in HEADLINES:
        if headline.suite == "scaling":  # which has no long benchmark
            continue
        (found,) = [r for r in long[headline.suite]["records"] if r["id"] == headline.id]
        if headline.kind == "peer":
            assert found["sense"] == "at least", f"{headline.id} is not how many times as fast"


def test_a_figure_that_is_missing_or_has_nothing_measured_is_failed() -> None:
    made = records_of(DATA)
    assert kept(DATA, [*made, record("data.1z")], error=None) == (made, {})
    nothing = replace(made[1], samples={}, what="not measured: no ours")
    found, failed = kept(DATA, [*made[:1], nothing, *made[3:]], error=None)
    assert found == [made[0], *made[3:]]
    assert failed == {"data.1": ["not measured: no ours", f"{made[2].id}: no such figure"]}
    assert kept(DATA, made[:1], error="late") == (made[:1], {"data.1": ["late"]})


def outcome_of(parts: Sequence[Part]) -> quick.Outcome:
    console = Console(file=io.StringIO())
    with Bench(say=console.print) as bench:
        return quick.measure(console, parts, bench=bench, scale=1.0)


def test_a_part_that_fails_or_takes_too_long_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench) -> Iterator[Record]:
        yield record("checkpoint.3a")
        raise RuntimeError("exit code 1: no such thing\nmore")

    def endless(bench: Bench) -> Sequence[Record]:
        while True:
            try:
                time.sleep(600)
            except Exception:  # as what waits for ranks may do
                continue

    monkeypatch.setattr(quick, "why_not", lambda: "not root")
    by_name = {part.name: part for part in PARTS}
    outcome = outcome_of([
        by_name["scaling"],
        replace(by_name["checkpoint"], measure=broken),
        replace(by_name["step"], measure=endless, budget_s=0.05),
        replace(DATA, measure=lambda bench: records_of(DATA)),
    ])  # fmt: skip
    assert [one.id for one in outcome.records] == ["checkpoint.3a", *DATA.ids]
    reason = "RuntimeError: exit code 1: no such thing"
    assert outcome.failed == {
        **{f"checkpoint.{number}": [reason] for number in (1, 2)},
        "step.characters-2": ["not done within 0.05 s"],
    }
    assert {name: part["outcome"] for name, part in outcome.parts.items()} == {
        "scaling": "not measured, no cluster: not root", "checkpoint": f"failed: {reason}",
        "step": "failed: not done within 0.05 s", "data": "measured",
    }  # fmt: skip


def test_the_file_keeps_the_runs_before_and_figures_that_were_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    for number, part in enumerate((DATA, PARTS[0])):
        about = {**ABOUT, "commit": f"commit {number}", "parts": {}}
        made = records_of(part)
        about["history"] = quick.history(path, about=about, records=made)
        results_file.write(path, Run(records=made), about=about)
    content = json.loads(path.read_text())
    assert [list(run["values"]) for run in content["history"]] == [DATA.ids, PARTS[0].ids]
    assert [run["commit"] for run in content["history"]] == ["commit 0", "commit 1"]
    assert {r["id"]: r.get("commit") for r in content["records"]} == {
        **dict.fromkeys(DATA.ids, "commit 0"),
        **dict.fromkeys(PARTS[0].ids),
    }
    tables = page_tables({"quick": content})
    assert tables["about"].startswith("2026-01-02 03:04 UTC, load of the machine before it 0.1. p, 2 cores")
    assert "of `commit 0`: data.1" in tables["about"]


def content_of(records: Sequence[Record], **more: Any) -> dict[str, Any]:
    about = {**ABOUT, "parts": {}, "history": [], **more}
    return results_file.merged(None, Run(records=records, failed={"checkpoint.3": ["late"]}), about=about)


def row(table: str, words: str) -> list[str]:
    (found,) = [line for line in table.splitlines() if words in line]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_limits_are_shown_as_cost_and_peers_as_speed() -> None:
    """Both with their ranges, goals, and the long benchmark's figure."""
    made = [
        replace(record("data.1a", 0.8), sense="at least", bar=0.5, rounds=3, range=(0.5, 0.9)),
        replace(record("checkpoint.1b", 3.0), sense="at least", bar=4.0, rounds=3, range=(2.0, 5.0)),
    ]
    long = {"commit": "abcdefabcdef", "records": [{**made[0].as_json(), "value": 0.4}]}
    tables = page_tables({"quick": content_of(made), "data": long})
    assert row(tables["limits"], "raw memmap")[2:] == [
        "1.25", "3: 1.11 to 2.00", "at most 2.00", "[2.50](benchmarks/data.md) at `abcdefa`",
    ]  # fmt: skip
    assert row(tables["peers"], "torch DCP as it comes")[2:] == [
        "3.00",
        "3: 2.00 to 5.00",
        "at least 4.00: **missed**",
        "",
    ]
    assert row(tables["limits"], "memcpy")[2] == "failed"
    assert row(tables["limits"], "zlib")[2] == "not measured"
    assert values_of(made) == {"data.1a": 1.25, "checkpoint.1b": 3.0}


def test_the_readme_shows_some_figures_of_the_long_benchmarks() -> None:
    cost = replace(record("checkpoint.3a", 0.4), sense="at least")
    speed = replace(record("checkpoint.2c", 3.0), sense="at least")
    hidden = record("checkpoint.1b", 2.0)
    table = readme_table({"checkpoint": {"records": [one.as_json() for one in (cost, speed, hidden)]}})
    assert row(table, "memcpy")[2:] == ["2.50 times as long", "[checkpoint](docs/benchmarks/checkpoint.md)"]
    assert row(table, "torch DCP")[2] == "3.00 times as fast"
    assert len(table.splitlines()) == 4


def test_the_last_runs_stand_side_by_side() -> None:
    runs = [
        {**MACHINE, "date": f"day {n}", "commit": f"{n}" * 9 + "+changes", "values": {"data.1a": 1.0 + n}}
        for n in range(7)
    ]
    lines = page_tables({"quick": content_of([], history=runs)})["history"].splitlines()
    assert lines[0].startswith("| | day 6, `6666666+changes`, 2 cores of p | day 5")
    assert lines[2] == "| `data.1a` | 7.00 | 6.00 | 5.00 | 4.00 | 3.00 |"


def test_the_speed_up_is_held_against_the_cores() -> None:
    def size(nodes: int, value: float) -> dict[str, Any]:
        speedup = {"value": value, "low": value - 0.1, "high": value + 0.1, "least": value, "greatest": 2.2}
        return {"nodes": nodes, "ranks": nodes, "repeats": 5, "speedup": speedup}

    document = {
        "baseline_ranks": 1, "sizes": [size(1, 1.0), size(2, 1.8), size(4, 1.5)],
        "runs": [{"ranks": n, "samples_per_s": 10.0 * n} for n in (1, 2, 4, 1)],
    }  # fmt: skip
    two, four = scaling_records(document, cores=2)
    assert (two.id, two.value, two.rounds) == ("scaling.nodes-2", pytest.approx(0.9), 5)
    assert (four.id, four.value) == ("scaling.nodes-4", pytest.approx(0.75))
    assert tuple(four.range) == (pytest.approx(0.75), pytest.approx(1.1))
    assert "speed-up 1.50 (95% interval 1.40 to 1.60) / 2, what 2 cores allow" in four.what
    assert two.samples["samples/s"] == {"1": [10.0, 10.0], "2": [20.0], "4": [40.0]}


def test_the_results_page_and_the_readme_are_what_the_files_say(tmp_path: Path) -> None:
    for name in ("README.md", "docs/results.md", "benchmarks/results"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True, parents=True)
        if copy.suffix:
            shutil.copy(REPOSITORY / name, copy)
        else:
            shutil.copytree(REPOSITORY / name, copy)
    refresh(tmp_path)
    for name in ("README.md", "docs/results.md"):
        assert (tmp_path / name).read_text() == (REPOSITORY / name).read_text()
    readme = (REPOSITORY / "README.md").read_text()
    assert "times as fast |" in readme.partition("<!-- begin measured -->")[2]
