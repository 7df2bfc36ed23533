"""What the reduction benchmark makes of its measurements."""

from __future__ import annotations

import importlib
import io
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import results_file as records
from benchmarks.command import finish
from benchmarks.reduction import page
from benchmarks.reduction.__main__ import measure
from benchmarks.reduction.bounds import bytes_out_of_a_node
from benchmarks.reduction.figures import bytes_records, step_records, sweep_records, time_records
from benchmarks.reduction.places import RanksFailed
from benchmarks.reduction.runs import QUICK
from benchmarks.results_file import Record, Run
from benchmarks.starting import LAUNCH, REPOSITORY, Ended, Start, start_of

ABOUT = {"machine": {}, "versions": {}}


def bound(algorithm: str, *, num_nodes: int = 4, ranks_per_node: int = 2) -> float:
    return bytes_out_of_a_node(
        algorithm, numel=25_000_000, elem_bytes=2, num_nodes=num_nodes, ranks_per_node=ranks_per_node
    )


def timed(**milliseconds: list[float]) -> dict[str, Any]:
    return {
        name.replace("_", "-", 1).replace("__", "/"): {"bits": 16, "seconds": [ms / 1000 for ms in values]}
        for name, values in milliseconds.items()
    }


PEERS = timed(
    mpi_fp32=[1700], horovod_fp32=[1800], horovod_fp16=[800], gloo_fp32=[1300], gloo_fp16=[600, 620, 640],
    ddp_fp32=[1250], ddp_fp16=[700],
)  # fmt: skip


def test_bounds_are_of_the_algorithms_own_kind() -> None:
    assert bound("hierarchical") == bound("hierarchical-ring") == 75e6
    assert bound("ring") == 87.5e6
    assert bound("direct") == bound("flat") == 150e6
    assert bytes_out_of_a_node("flat", numel=8, elem_bytes=4, num_nodes=4, ranks_per_node=2) == 56
    assert bound("hierarchical", num_nodes=1) == bound("ring", num_nodes=1) == 0
    with pytest.raises(ValueError, match="no bound is known"):
        bound("tree")


def test_one_rank_a_node_needs_the_same_bytes_in_one_level_and_in_two() -> None:
    assert bound("ring", ranks_per_node=1) == bound("direct", ranks_per_node=1)
    assert bound("ring", ranks_per_node=1) == bound("hierarchical", ranks_per_node=1)


def test_the_node_that_sent_most_is_held_against_the_bound() -> None:
    found = {
        "pause": {"node_bytes": [100, 0, 0, 0], "seconds": 2.0},
        "hierarchical/fp16": {"node_bytes": [75_000_000, 90_000_000, 75_000_000, 75_000_000], "seconds": 3.0},
    }
    (record,) = bytes_records(found, numel=25_000_000, elem_bytes=2, num_nodes=4, ranks_per_node=2)
    assert record.id == "reduction.1.hierarchical"
    assert record.value == 1.2
    assert not record.holds


def test_times_are_held_against_the_best_peer_of_each_kind() -> None:
    found = {
        **PEERS,
        "ours/16": {"seconds": [0.5]},
        "ours/8": {"seconds": [0.31]},
        "stream": {"seconds": [0.6, 0.5, 9.0]},
    }
    made = {
        record.id: record
        for record in time_records(
            found, rate="200mbit", ours_16="ours/16", ours_8="ours/8", bound_bytes=12e6, stream_bytes=12_000_000,
            full=True,
        )
    }  # fmt: skip
    values = {name.removeprefix("reduction.2.200mbit."): record.value for name, record in made.items()}
    assert values == {
        "bound": pytest.approx(0.5 / 0.6),
        "best-16-bit-peer": pytest.approx(620 / 500),
        "ddp-gloo-fp32": pytest.approx(1250 / 500),
        "horovod-fp32": pytest.approx(1800 / 500),
        "8-bit": pytest.approx(620 / 310),
    }
    assert all(record.holds for record in made.values())


def test_a_peer_with_open_mpis_ring_counts_where_it_is_the_best() -> None:
    found = {
        **PEERS,
        "ours/16": {"seconds": [0.5]},
        "ours/8": {"seconds": [0.3]},
        "ours/16, ring": {"seconds": [0.1]},  # no peer
        "horovod-fp32, ring": {"seconds": [1.2]},
        "horovod-fp16, ring": {"seconds": [0.55]},
        "stream": {"seconds": [0.5]},
    }
    made = time_records(
        found, rate="200mbit", ours_16="ours/16", ours_8="ours/8", bound_bytes=1.0, stream_bytes=1, full=True
    )
    values = {record.id.removeprefix("reduction.2.200mbit."): record.value for record in made}
    assert values["best-16-bit-peer"] == pytest.approx(550 / 500)
    assert values["8-bit"] == pytest.approx(550 / 300)
    assert values["horovod-fp32"] == pytest.approx(1800 / 500)  # as it comes
    assert values["horovod-fp32.ring"] == pytest.approx(1200 / 500)


def test_exposed_communication_is_taken_step_by_step_from_the_one_beside_it() -> None:
    slow = 1.0  # in one of two rounds, and for one pair of a round
    without = [[0.1, 0.1, 0.1 + slow], [0.1 + slow] * 3]
    more = {
        "mpi-fp32": 0.1, "ddp-fp32": 0.1, "horovod-fp32": 0.1, "ddp-fp16": 0.04, "horovod-fp16": 0.04,
        "ours-fp32": 0.05, "ours-fp16": 0.02,
    }  # fmt: skip
    late = 0.04  # of the two ranks one computes longer; with communication the other waits for it
    steps = {
        name: {
            "without": [[[step, step - late] for step in block] for block in without],
            "steps": [[[step + by, step + by] for step in block] for block in without],
        }
        for name, by in more.items()
    }
    made = step_records({"transformer": steps}, samples_per_step={"transformer": 12})
    values = {record.id.removeprefix("reduction.3.transformer."): record.value for record in made}
    assert values["exposed"] == values["exposed.fp16"] == pytest.approx(0.5)
    assert values["exposed.fp32"] == pytest.approx(0.5)
    assert values["exposed.mean"] == pytest.approx((0.02 + late / 2) / (0.04 + late / 2))
    # Of one round 0.14 / 0.1 and 0.12 / 0.1, of the other, a slow one, hardly more than 1.
    peer, ours = ((1 + by / 0.1 + 1 + by / (0.1 + slow)) / 2 for by in (0.04, 0.02))
    assert values["throughput"] == pytest.approx(peer / ours)
    assert values["throughput.medians"] == pytest.approx((0.14 + slow) / (0.12 + slow))


def test_a_method_that_was_timed_while_the_machine_was_slow_is_not_called_slow() -> None:
    peers = ("mpi-fp32", "ddp-fp32", "horovod-fp32", "ddp-fp16", "horovod-fp16")
    of = {name: {"steps": [[[1.10, 1.10]]], "without": [[[1.0, 1.0]]]} for name in (*peers, "ours-fp16")}
    of["ours-fp32"] = {"steps": [[[2.10, 2.10]]], "without": [[[2.0, 2.0]]]}
    made = step_records({"transformer": of}, samples_per_step={"transformer": 12})
    values = {record.id.removeprefix("reduction.3.transformer."): record.value for record in made}
    assert values["throughput"] == pytest.approx(1.10 / 1.05)
    assert values["throughput.medians"] == pytest.approx(1.10 / 2.10)


def test_a_peer_counts_as_it_was_started_best_and_ours_as_launch_starts_it() -> None:
    more = {
        "mpi-fp32": 0.10, "ddp-fp32": 0.1, "ddp-fp16": 0.1, "horovod-fp32": 0.4, "horovod-fp16": 0.4,
        "ours-fp32": 0.03, "ours-fp16": 0.03,
        "mpi-fp32, yielding": 0.1, "horovod-fp32, yielding": 0.06, "horovod-fp16, yielding": 0.09,
        "ours-fp32, yielding": 0.01, "ours-fp16, yielding": 0.01,
    }  # fmt: skip
    slower = 1.0  # that launch was timed while the machine was slow
    of = {}
    for name, by in more.items():
        alone = 1.0 + slower * name.endswith("yielding")
        of[name] = {"steps": [[[alone + by, alone + by]]], "without": [[[alone, alone]]]}
    of["horovod-fp32, yielding"]["without"] = [[[2.05, 2.05]]]  # its thread slows these: the others' count
    made = {r.id: r for r in step_records({"transformer": of}, samples_per_step={"transformer": 12})}
    exposed = made["reduction.3.transformer.exposed"]
    assert exposed.value == pytest.approx(0.03 / 0.06)
    assert "ours-fp32 / horovod-fp32, yielding (30.0 / 60.0 ms)" in exposed.what
    assert made["reduction.3.transformer.exposed.fp16"].value == pytest.approx(0.03 / 0.09)
    assert made["reduction.3.transformer.throughput"].value == pytest.approx(1.03 / 1.03)
    assert made["reduction.3.transformer.throughput.medians"].value == pytest.approx(1.10 / 1.03)


def test_what_horovods_thread_takes_from_the_steps_beside_it_counts_against_it() -> None:
    peers = ("mpi-fp32", "ddp-fp32", "ddp-fp16")
    of = {name: {"steps": [[[1.10, 1.10]]], "without": [[[1.0, 1.0]]]} for name in (*peers, "ours-fp16")}
    of["ours-fp32"] = {"steps": [[[1.05, 1.05]]], "without": [[[1.0, 1.0]]]}
    for name in ("horovod-fp32", "horovod-fp16"):
        of[name] = {"steps": [[[1.21, 1.21]]], "without": [[[1.20, 1.20]]]}
    made = {r.id: r for r in step_records({"transformer": of}, samples_per_step={"transformer": 21})}
    assert made["reduction.3.transformer.exposed"].value == pytest.approx(0.05 / 0.10)
    samples = made["reduction.3.transformer.exposed.fp32"].samples["exposed s"]
    assert samples["mpi-fp32"] == [pytest.approx(0.10)]
    found = made["reduction.3.transformer.throughput"]
    assert found.samples["slowed by"]["horovod-fp16"] == pytest.approx(1.21)
    assert found.value == pytest.approx(1.10 / 1.05)
    assert "ours-fp32 / mpi-fp32 (20.0 / 19.1)" in found.what
    (table,) = page.raw_tables([r.as_json() for r in made.values()]).values()
    assert table.splitlines()[2].startswith("| ours-fp32 |")
    assert "| horovod-fp16 | 21.0% | 1210.0 | 1200.0 |" in table
    old = {"id": "reduction.3.mlp.throughput", "samples": {"median step s": {"none": 1.0}}}
    assert page.raw_tables([old]) == {}  # of results of an earlier version


def test_auto_is_held_against_the_best_choice_that_was_timed_to_the_end() -> None:
    times = {"auto/auto": [2.0, 2.2, 2.1], "ring/fp16": [2.0, 2.0, 2.0], "flat/fp32": [1.0]}
    found = {"1024": {"times": times, "runs": "ring"}}
    (record,) = sweep_records(found, place="one-node", auto="auto/auto")
    assert record.id == "reduction.4.one-node.4KiB"
    assert record.value == pytest.approx(1.05)
    assert record.holds


def record(name: str, value: float = 1.0) -> Record:
    return Record(id=name, what="w", value=value, bar=1.0, sense="at most", unit="s/s", samples=[value])


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


class Nowhere:
    """A place where no ranks can be started."""

    def __init__(self) -> None:
        self.starts: list[Start] = []

    def run(self, case: str, settings: Any, *, timeout_s: float, variables: Any = None) -> Any:
        raise RanksFailed("exit code 1")


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
    importlib.import_module(f"benchmarks.{benchmark}.page").refresh(page_path, content)
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
    place = Nowhere()
    run = measure(console, [3, 4], one_node=place, cluster=None, scale=QUICK)  # type: ignore[arg-type]
    assert run.records == []
    assert run.failed == {"reduction.3": ["training steps on one node"], "reduction.4": ["auto on one node"]}
    old = {**ABOUT, "commit": "a", "records": [record(f"reduction.{n}.x").as_json() for n in (1, 3, 4)]}
    new = records.merged(old, run, about={**ABOUT, "commit": "b"})
    assert [(r["id"], r["commit"]) for r in new["records"]] == [("reduction.1.x", "a")]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(old))
    about = {**ABOUT, "commit": "b"}
    assert finish(console, run, benchmark="reduction", about=about, output=path, refresh=page.refresh) == 1
    assert [r["id"] for r in json.loads(path.read_text())["records"]] == ["reduction.1.x"]


def test_a_part_that_fails_is_named_with_the_parts_that_did_not(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("<!-- begin reduction.2 -->\n<!-- end reduction.2 -->\n")
    run = Run(records=[record("reduction.2.1gbit.x")], failed={"reduction.2": ["at 200 Mbit/s"]})
    machine = {"processor": "p", "cores": 2, "memory_gb": 4, "kernel": "6"}
    about = {"machine": machine, "versions": {}, "commit": "b"}
    old = {**about, "commit": "a", "records": [record("reduction.2.200mbit.x").as_json()]}
    page.refresh(path, records.merged(old, run, about=about))
    text = path.read_text()
    assert "| `reduction.2.1gbit.x` |" in text
    assert "\n\nFailed, so not measured: at 200 Mbit/s.\n<!-- end" in text
    assert "200mbit" not in text


def test_the_page_is_what_the_results_say() -> None:
    """Of each benchmark; so that no table on a page can be of another run than the file."""
    for benchmark in ("reduction", "data", "checkpoint", "step"):
        path = REPOSITORY / "docs" / "benchmarks" / f"{benchmark}.md"
        before = path.read_text()
        content = json.loads((REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json").read_text())
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name) / "page.md"
            copy.write_text(before)
            importlib.import_module(f"benchmarks.{benchmark}.page").refresh(copy, content)
            assert copy.read_text() == before


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
    page.refresh(path, content)
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
        page.refresh(path, content)
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
    page.refresh(path, content)
    assert "commit `abc`; of `0123456789ab`: reduction.1, reduction.4.\n" in path.read_text()


def test_the_page_has_a_place_for_every_table() -> None:
    text = page_text()
    names = ["about", *(f"{kind}reduction.{number}" for number in range(1, 5) for kind in ("", "started."))]
    names += ["times.200mbit", "times.1gbit", "steps.transformer", "steps.mlp"]
    for name in names:
        assert f"<!-- begin {name} -->" in text
        assert f"<!-- end {name} -->" in text


def page_text() -> str:
    return (REPOSITORY / "docs" / "benchmarks" / "reduction.md").read_text()
