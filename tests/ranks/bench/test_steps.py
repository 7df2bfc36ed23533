"""The step benchmark with real ranks: runs take turns, are stopped in between, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.step.runs import OneNode, Scale, Turns, measure, pack, working_directory
from benchmarks.step.variants import CELLS, DEFAULT, PEER, companions, default_of

pytestmark = pytest.mark.launches

CELL = CELLS["digits-2"]
TINY = Scale(rounds=1, share=0.05, screening_share=0.05, start_s=120.0, restart_every=0)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A user's folder, with the data."""
    with working_directory() as made:
        pack(CELL.recipe, directory=made)
        yield made


def recorded_bytes(directory: Path) -> list[int]:
    """Of each rank of each run."""
    return [path.stat().st_size for path in sorted(directory.glob("runs/*/metrics/*"))]


def processes_in(directory: Path) -> list[int]:
    """Processes whose working directory it is."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == directory:
                found.append(int(entry.name))
    return found


def test_a_cell_is_measured_with_ranks_as_a_user_starts_them(directory: Path) -> None:
    (found,) = measure(
        CELL, place=OneNode(), directory=directory, scale=TINY, seed=1, say=lambda what: None,
        variants=[default_of(CELL)],
    )  # fmt: skip
    assert found.failed == {}
    assert set(found.screening) == set(found.rounds[0]) == {DEFAULT}
    assert all(rate > 0 for rate in (*found.screening.values(), *found.rounds[0].values()))
    assert found.runs[DEFAULT].endswith(", hierarchical, fp16")
    assert "mpirun -n 2" in found.started[DEFAULT]
    assert "hpctrain train examples/digits.toml --set run.epochs" in found.started[DEFAULT]
    assert found.variables[DEFAULT]["OMP_NUM_THREADS"].isdigit()
    assert processes_in(directory) == []


@pytest.mark.thorough
def test_horovods_own_loop_trains_in_its_turns_only_and_a_run_that_dies_is_named(directory: Path) -> None:
    peer = next(variant for variant in companions(CELL) if variant.name == PEER)
    failed: dict[str, str] = {}
    shutil.rmtree(directory / "runs")
    with Turns(CELL, place=OneNode(), directory=directory, scale=TINY, failed=failed) as turns:
        turns.start(peer)
        assert failed == {}
        before = recorded_bytes(directory)
        assert len(before) == 2
        time.sleep(0.3)
        assert recorded_bytes(directory) == before
        rate = turns.turn(PEER, share=0.05, at_most_s=10)
        assert rate is not None
        assert rate > 0
        assert all(now > then for now, then in zip(recorded_bytes(directory), before, strict=True))
        turns.up[PEER].kill_ranks()
        assert turns.turn(PEER, share=0.05, at_most_s=10) is None
        assert "exit code" in failed[PEER]
        assert turns.up == {}
    assert processes_in(directory) == []
