"""Saved by N ranks into 1 to 4 files and loaded by M, for all N and M from 1 to 8: the same bits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import Shard, load, save
from hpctrain.comm.backends.threads_world import run_threads
from tests.ranks.checkpoint import reshape_cases as cases
from tests.ranks_launcher import run_ranks
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors

NUM_RANKS = range(1, 9)
NUM_FILES = range(1, 5)


@functools.cache
def tensors() -> dict[str, torch.Tensor]:
    """Small ones: there are hundreds of loads."""
    made = whole_tensors()
    made["large"] = made["large"][:40]
    made["model/layer.0/weight"] = made["model/layer.0/weight"][:30]
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of every number of ranks and of files."""
    directory = tmp_path_factory.mktemp("saved")

    def save_all(world: Any) -> None:
        state = state_of(world.rank, world.num_ranks, tensors=tensors())
        for num_files in NUM_FILES:
            place = directory / f"{world.num_ranks}-ranks-{num_files}-files"
            save(state, directory=place, step=1, comm=world, files=num_files)

    for num_ranks in NUM_RANKS:
        run_threads(num_ranks, save_all, timeout_s=60)
    found = sorted(path for place in directory.iterdir() for path in place.iterdir())
    assert len(found) == len(NUM_RANKS) * len(NUM_FILES)
    # As many files as asked for, but never more than ranks; all shapes of a folder are among them.
    counts = {(path.parent.name, len(list(path.iterdir())) if path.is_dir() else 1) for path in found}
    assert ("8-ranks-4-files", 4) in counts
    assert ("3-ranks-4-files", 3) in counts
    assert ("8-ranks-1-files", 1) in counts
    return found


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_what_any_number_of_ranks_saved_is_loaded_bit_for_bit(saved: list[Path], num_ranks: int) -> None:
    expected = tensors()

    def load_all(world: Any) -> int:
        state = state_of(world.rank, world.num_ranks, tensors=expected)
        shards = {item.name: item for item in state.items if isinstance(item, Shard)}
        regions = {name: (shard.offset, tuple(shard.tensor.shape)) for name, shard in shards.items()}
        for path in saved:
            checkpoint, found = load(path, comm=world, regions=regions)
            assert checkpoint.document == state.document
            assert set(found) == set(expected)
            for name, tensor in found.items():
                wanted = shards[name].tensor if name in shards else expected[name]
                assert same_bits(tensor, wanted), (path.parent.name, name)
        return len(saved)

    assert run_threads(num_ranks, load_all, timeout_s=120) == [len(saved)] * num_ranks


@pytest.mark.launches
def test_processes_load_what_threads_saved_and_the_other_way_round(saved: list[Path], tmp_path: Path) -> None:
    some = [
        path
        for path in saved
        if path.parent.name in ("1-ranks-1-files", "5-ranks-3-files", "8-ranks-4-files")
    ]
    result = run_ranks(3, cases.load_and_save, [str(path) for path in some], str(tmp_path))
    assert result.outputs == [{"loaded": len(some), "saved": 4}] * 3

    def load_theirs(world: Any) -> int:
        return cases.load_all(world, [str(path) for path in sorted(tmp_path.glob("*/step-*"))])

    assert run_threads(2, load_theirs, timeout_s=60) == [4, 4]
