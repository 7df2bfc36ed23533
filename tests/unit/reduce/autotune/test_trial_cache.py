"""Measurements are kept in files, and read by runs to which they apply."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.reduce.autotune.tune import (
    CalibrationFiles,
    TrialResults,
    find_choice,
)
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.topology import Topology
from tests.unit.reduce.autotune.real_reducers import CANDIDATES, CPU, NODES, make_real


class TickingClock:
    """One millisecond passes between two readings, however long the machine takes."""

    def __init__(self) -> None:
        self._readings = 0

    def __call__(self) -> float:
        self._readings += 1
        return self._readings * 1e-3


def find(
    files: CalibrationFiles,
    *,
    topology: Topology = NODES,
    versions: dict[str, str] | None = None,
) -> tuple[TrialResults, list[str], list[str]]:
    """`find_choice` on threads: what all ranks found, which reducers were made, and rank 0's notes."""

    def on_rank(world: World) -> tuple[TrialResults, list[str], list[str]]:
        made: list[str] = []
        notes: list[str] = []
        found = find_choice(
            world, make=make_real(world, topology, made=made), candidates=CANDIDATES, topology=topology,
            device=CPU, files=files, versions=versions or {"hpctrain": "1"}, note=notes.append,
            budget_s=0.2, clock=TickingClock(),
        )  # fmt: skip
        return found, made, notes

    results = run_threads(topology.num_ranks, on_rank)
    assert all(result == results[0] for result in results)
    return results[0]


def test_a_second_start_takes_the_numbers_of_the_first(tmp_path: Path) -> None:
    files = CalibrationFiles(run=tmp_path / "reduction.json")
    first, made, notes = find(files)
    assert sorted(made) == ["direct", "flat"]
    assert notes == []
    assert first.source.startswith("measured in ")
    assert {level.axis for level in first.levels} == {"local", "node"}
    second, made, notes = find(files)
    assert made == []
    assert notes == []
    assert second.source == f"from {tmp_path / 'reduction.json'}"
    assert second.choice == first.choice
    assert second.levels == first.levels


def test_other_ranks_or_versions_measure_anew_and_keep_what_was_there(tmp_path: Path) -> None:
    files = CalibrationFiles(run=tmp_path / "reduction.json")
    first, _, _ = find(files)
    for options, name in (
        ({"topology": Topology.from_node_names(["a", "b"])}, "ranks by node"),
        ({"versions": {"hpctrain": "2"}}, "versions"),
    ):
        _, made, notes = find(files, **options)
        assert sorted(made) == ["direct", "flat"]
        assert len(notes) == 1
        assert f"measurements of other {name}" in notes[0]
    assert len(json.loads((tmp_path / "reduction.json").read_text())["entries"]) == 3
    again, made, _ = find(files)
    assert made == []
    assert again.choice == first.choice


def _without(path: Path, *names: str) -> None:
    content = json.loads(path.read_text())
    place: Any = content
    for name in names[:-1]:
        place = place[int(name)] if name.isdigit() else place[name]
    del place[names[-1]]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(path.read_text()[:100]),
        lambda path: path.write_bytes(b"\xff\x00"),
        lambda path: path.write_text("[]"),
        lambda path: _without(path, "schema"),
        lambda path: _without(path, "entries", "0", "found"),
        lambda path: _without(path, "entries", "0", "found", "levels"),
        lambda path: path.write_text(path.read_text().replace('"seconds": 0', '"seconds": -1')),
        lambda path: path.write_text(path.read_text().replace('"algorithm": "flat"', '"algorithm": "x"')),
    ],
)
def test_a_damaged_file_is_measured_anew_and_replaced(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path = tmp_path / "reduction.json"
    files = CalibrationFiles(run=path)
    find(files)
    damage(path)
    _, made, notes = find(files)
    assert sorted(made) == ["direct", "flat"]
    assert len(notes) == 1
    assert f"{path} cannot be read" in notes[0]
    assert find(files)[1:] == ([], [])


def test_a_file_that_runs_share_is_copied_into_the_run(tmp_path: Path) -> None:
    shared = tmp_path / "cluster.json"
    find(CalibrationFiles(shared=shared, run=tmp_path / "one" / "reduction.json"))
    files = CalibrationFiles(shared=shared, run=tmp_path / "two" / "reduction.json")
    second, made, _ = find(files)
    assert made == []
    assert second.source == f"from {shared}"
    shared.unlink()
    third, made, _ = find(files)
    assert made == []
    assert third.choice == second.choice


def test_a_file_that_cannot_be_written_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no folder")
    found, made, notes = find(CalibrationFiles(run=tmp_path / "taken" / "reduction.json"))
    assert made
    assert found.choice.costs
    assert any("cannot be written" in note for note in notes)


def test_one_rank_or_one_candidate_measures_nothing() -> None:
    def on_rank(world: World) -> TrialResults:
        def make(algorithm: str, wire: str) -> BucketReducer:
            raise AssertionError("a reducer was made")

        candidates = CANDIDATES if world.num_ranks == 1 else CANDIDATES[1:]
        topology = Topology.from_node_names(["a"] * world.num_ranks)
        return find_choice(world, make=make, candidates=candidates, topology=topology, device=CPU)

    alone = run_threads(1, on_rank)[0]
    assert alone.source == "not measured: one rank"
    assert alone.choose(gradient_bytes=1000).candidate == CANDIDATES[0]
    together = run_threads(2, on_rank)[0]
    assert together.source == "not measured: no other algorithm is available"
    assert together.choose(gradient_bytes=10**9).candidate == CANDIDATES[1]
