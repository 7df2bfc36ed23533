"""The results file and the page: what a run of some figures keeps, replaces, and writes."""

from __future__ import annotations

import io
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import results_file as records
from benchmarks.harness import Bench, Part, finish, measure
from benchmarks.places import RanksFailed
from benchmarks.reduction.suite import SUITE
from benchmarks.results_file import Record, Run
from benchmarks.starting import LAUNCH, REPOSITORY, Ended, start_of
from tests.unit.benchmarks.records import SUITES, record, suite_of

ABOUT = {"machine": {}, "versions": {}}


def test_a_run_of_some_figures_keeps_the_others_with_their_commit() -> None:
    old = {
        **ABOUT,
        "commit": "a",
        "records": [record("reduction.1.x").as_json(), record("reduction.2.y").as_json()],
    }
    again_2 = Run(records=[record("reduction.2.z")])
    new = records.merged(old, again_2, about={**ABOUT, "commit": "b"})
    assert [(r["id"], r.get("commit")) for r in new["records"]] == [
        ("reduction.1.x", "a"),
        ("reduction.2.z", None),
    ]
    again = records.merged(new, again_2, about={**ABOUT, "commit": "c"})
    assert [r.get("commit") for r in again["records"]] == ["a", None]


def test_the_range_is_that_of_the_rounds_or_of_the_extremes_of_what_had_other_rounds() -> None:
    assert records.over_rounds([2.0, 3.0, 8.0], [1.0, 3.0, 2.0]) == {"rounds": 3, "range": (1.0, 4.0)}
    apart = records.over_rounds([2.0, 3.0], [1.0, 4.0, 2.0], same_rounds=False)
    assert apart == {"rounds": 2, "range": (0.5, 3.0)}
    with pytest.raises(ValueError, match="zip"):
        records.over_rounds([1.0], [1.0, 2.0])
    plain = record("reduction.1.x")
    assert {"rounds", "range"} & set(plain.as_json()) == set()
    assert replace(plain, **apart).as_json()["range"] == (0.5, 3.0)


@pytest.mark.parametrize("benchmark", ["reduction", "data", "checkpoint"])
def test_a_figure_that_fails_leaves_no_older_one_in_the_results_and_on_the_page(
    tmp_path: Path, benchmark: str
) -> None:
    path, page_path = tmp_path / "results.json", tmp_path / "page.md"
    path.write_text((REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json").read_text())
    before = {records.figure_of(r["id"]) for r in json.loads(path.read_text())["records"]}
    page_path.write_text((REPOSITORY / "docs" / "benchmarks" / f"{benchmark}.md").read_text())
    about = records.about_this_run(REPOSITORY, benchmark=benchmark)
    failed = f"{benchmark}.2"
    content = records.write(path, Run(failed={failed: ["16 MB"]}), about=about)
    suite_of(benchmark).refresh(page_path, content)
    kept = {records.figure_of(r["id"]) for r in json.loads(path.read_text())["records"]}
    assert failed in before
    assert kept == before - {failed}
    assert json.loads(path.read_text())["figures"][failed] == {"failed": ["16 MB"]}
    text = page_path.read_text()
    assert f"| `{failed}" not in text
    assert f"<!-- begin {failed} -->\nFailed, so not measured: 16 MB.\n<!-- end {failed} -->" in text
    if benchmark == "reduction":  # its table of all methods too
        assert "<!-- begin times.200mbit -->\nNot measured.\n" in text
    # Measured again, nothing is left of the failure.
    again = Run(records=[record(f"{failed}.x")])
    content = records.write(path, again, about={**about, "commit": "later"})
    assert failed not in {name for name, entry in content["figures"].items() if "failed" in entry}
    assert [r["id"] for r in content["records"] if records.figure_of(r["id"]) == failed] == [f"{failed}.x"]


def test_the_command_drops_what_it_could_not_measure_again(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())

    def fails(bench: Bench) -> list[Record]:
        raise RanksFailed("exit code 1")

    parts = [
        Part(figures=(figure,), title=title, measure=fails)
        for figure, title in (("3", "steps"), ("4", "auto"))
    ]
    with Bench(say=lambda what: None) as bench:
        run, complete = measure("reduction", parts, bench=bench)
    assert complete
    assert run.records == []
    assert run.failed == {"reduction.3": ["steps"], "reduction.4": ["auto"]}
    old = {**ABOUT, "commit": "a", "records": [record(f"reduction.{n}.x").as_json() for n in (1, 3, 4)]}
    new = records.merged(old, run, about={**ABOUT, "commit": "b"})
    assert [(r["id"], r["commit"]) for r in new["records"]] == [("reduction.1.x", "a")]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(old))
    about = {**ABOUT, "commit": "b"}
    assert finish(console, run, benchmark="reduction", about=about, output=path, refresh=SUITE.refresh) == 1
    assert [r["id"] for r in json.loads(path.read_text())["records"]] == ["reduction.1.x"]


def test_a_part_that_fails_is_named_with_the_parts_that_did_not(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- begin reduction.2 -->\n<!-- end reduction.2 -->\n")
    run = Run(records=[record("reduction.2.1gbit.x")], failed={"reduction.2": ["at 200 Mbit/s"]})
    machine = {"processor": "p", "cores": 2, "memory_gb": 4, "kernel": "6"}
    about = {"machine": machine, "versions": {}, "commit": "b"}
    old = {**about, "commit": "a", "records": [record("reduction.2.200mbit.x").as_json()]}
    SUITE.refresh(path, records.merged(old, run, about=about))
    text = path.read_text()
    assert "| `reduction.2.1gbit.x` |" in text
    assert "\n\nFailed, so not measured: at 200 Mbit/s.\n<!-- end" in text
    assert "200mbit" not in text


def page_of(benchmark: str) -> Path:
    return REPOSITORY / "docs" / "benchmarks" / f"{benchmark}.md"


@pytest.mark.parametrize("benchmark", SUITES)
def test_the_page_is_what_the_results_say(tmp_path: Path, benchmark: str) -> None:
    """So that no table on a page can be of another run than the file."""
    results = REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json"
    if not results.exists():
        pytest.skip("not measured yet")
    copy = tmp_path / "page.md"
    copy.write_text(page_of(benchmark).read_text())
    suite_of(benchmark).refresh(copy, json.loads(results.read_text()))
    assert copy.read_text() == page_of(benchmark).read_text()


@pytest.mark.parametrize("benchmark", SUITES)
def test_the_page_has_a_place_for_every_table(benchmark: str) -> None:
    suite, text = suite_of(benchmark), page_of(benchmark).read_text()
    results = REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json"
    tables = suite.tables(json.loads(results.read_text())) if results.exists() else {}
    for name in ("about", *(f"{benchmark}.{figure}" for figure in suite.figures), *tables):
        assert text.count(f"<!-- begin {name} -->\n") == text.count(f"<!-- end {name} -->") == 1, name


START = {
    "command": "hpctrain launch -n 2 -- python x", "launched": "mpirun -n 2 python x", "notes": [],
    "ranks": [
        {"ranks": [0, 1], "cores": [0, 1], "threads": 1, "variables": {"OMP_NUM_THREADS": "1"}, "preload": []},
        {"ranks": [3], "cores": [0, 2], "threads": 2, "variables": {}, "preload": ["a.so"]},
    ],
}  # fmt: skip


def test_the_page_says_how_the_ranks_of_each_figure_were_started(tmp_path: Path) -> None:
    run = Run(
        records=[record("reduction.4.x")], started={"reduction.4": {"one": [START], "two": [START, START]}}
    )
    machine = {"processor": "p", "cores": 2, "memory_gb": 4, "kernel": "6"}
    content = records.merged(None, run, about={"machine": machine, "versions": {}, "commit": "b"})
    path = tmp_path / "page.md"
    path.write_text("<!-- begin started.reduction.4 -->\n<!-- end started.reduction.4 -->\n")
    SUITE.refresh(path, content)
    assert path.read_text().splitlines()[1:-1] == [
        "- one; two: `hpctrain launch -n 2 -- python x`, which ran `mpirun -n 2 python x`. As the ranks found "
        "themselves: ranks 0 to 1: cores 0 to 1, 1 thread each, preloaded: nothing, `OMP_NUM_THREADS=1`; rank 3: "
        "cores 0, 2, 2 threads each, preloaded: a.so."
    ]


def test_the_record_of_a_start_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    argv = [
        *LAUNCH,
        "-n",
        "2",
        "--",
        sys.executable,
        "-m",
        "benchmarks.reduction.ranks",
        str(tmp_path / "a.json"),
    ]
    said = f"hpctrain launch: a note\nhpctrain launch: env A=1 /usr/bin/mpirun -n 2 {shlex.join(argv[-4:])}\n"
    facts = {"cores": [0], "threads": 1, "variables": {}, "preload": []}
    start = start_of(
        argv, Ended(returncode=0, stdout="", stderr=said), ranks=[facts, facts, {**facts, "cores": [1]}],
        variables={"B": "2"}, directory=tmp_path,
    )  # fmt: skip
    assert (
        start.command == "B=2 hpctrain launch -n 2 -- python -m benchmarks.reduction.ranks DIRECTORY/a.json"
    )
    assert (
        start.launched == "env A=1 /usr/bin/mpirun -n 2 python -m benchmarks.reduction.ranks DIRECTORY/a.json"
    )
    assert list(start.notes) == ["a note"]
    assert [group["ranks"] for group in start.ranks] == [[0, 1], [2]]


def test_the_file_is_json_with_what_the_issue_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "results" / "reduction.json"
    about = records.about_this_run(REPOSITORY, benchmark="reduction")
    records.write(path, Run(records=[record("reduction.1.x"), record("reduction.2.y", 1.5)]), about=about)
    content = json.loads(path.read_text())
    assert {"machine", "versions", "commit", "figures", "records"} == set(content)
    assert [r["holds"] for r in content["records"]] == [True, False]
    assert {"id", "value", "bar", "unit", "holds", "samples"} <= set(content["records"][0])


def test_the_pages_tables_are_written_between_their_markers(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- begin reduction.1 -->\nold\n<!-- end reduction.1 -->\nafter\n")
    content = {
        "machine": {"processor": "p", "cores": 2, "memory_gb": 4, "kernel": "6"}, "versions": {"torch": "2"},
        "commit": "abc", "records": [record("reduction.1.x", 1.5).as_json()],
    }  # fmt: skip
    for _ in range(2):
        SUITE.refresh(path, content)
        text = path.read_text()
        assert text.startswith("before\n<!-- begin reduction.1 -->\n| id |")
        assert text.endswith("<!-- end reduction.1 -->\nafter\n")
        assert text.count("| `reduction.1.x` | w | 1.5 | at most 1 | **no** |") == 1


def test_the_page_says_of_which_commit_a_figure_is_that_was_kept(tmp_path: Path) -> None:
    kept = [
        {**record(name).as_json(), "commit": "0123456789abcdef"}
        for name in ("reduction.1.x", "reduction.4.y")
    ]
    content = {
        "machine": {"processor": "p", "cores": 2, "memory_gb": 4, "kernel": "6"}, "versions": {"torch": "2"},
        "commit": "abc", "records": [*kept, record("reduction.3.z").as_json()],
    }  # fmt: skip
    path = tmp_path / "page.md"
    path.write_text("<!-- begin about -->\n<!-- end about -->\n")
    SUITE.refresh(path, content)
    assert "commit `abc`; of `0123456789ab`: reduction.1, reduction.4.\n" in path.read_text()
