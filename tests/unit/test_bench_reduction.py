"""What the reduction benchmark makes of its measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results_file as records
from benchmarks.reduction import page
from benchmarks.reduction.bounds import bytes_out_of_a_node
from benchmarks.reduction.figures import bytes_records, step_records, sweep_records, time_records
from benchmarks.results_file import Record

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
    new = records.merged(old, [record("reduction.2.z").as_json()], about={**ABOUT, "commit": "b"})
    assert [(r["id"], r.get("commit")) for r in new["records"]] == [
        ("reduction.1.x", "a"),
        ("reduction.2.z", None),
    ]
    again = records.merged(new, [record("reduction.2.z").as_json()], about={**ABOUT, "commit": "c"})
    assert [r.get("commit") for r in again["records"]] == ["a", None]


def test_the_file_is_json_with_what_the_issue_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "results" / "reduction.json"
    repository = Path(__file__).resolve().parents[2]
    records.write(
        path,
        [record("reduction.1.x"), record("reduction.2.y", 1.5)],
        repository=repository,
        benchmark="reduction",
    )
    content = json.loads(path.read_text())
    assert {"machine", "versions", "commit", "records"} == set(content)
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
    names = ["about", *(f"reduction.{number}" for number in range(1, 5))]
    names += ["times.200mbit", "times.1gbit", "steps.transformer", "steps.mlp"]
    for name in names:
        assert f"<!-- begin {name} -->" in text
        assert f"<!-- end {name} -->" in text


def page_text() -> str:
    return (Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "reduction.md").read_text()
