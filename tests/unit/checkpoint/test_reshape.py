"""Saved by N ranks into 1 to 4 files and loaded by M, for all N and M from 1 to 8: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint import TensorShard, load
from hpctrain.comm.backends.threads_world import run_threads
from tests.unit.checkpoint.states import same_bits, save_by_threads, small_tensors, state_of

NUM_RANKS = range(1, 9)
NUM_FILES = range(1, 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of every number of ranks and of files."""
    directory = tmp_path_factory.mktemp("saved")
    found = sorted(
        path
        for num_ranks in NUM_RANKS
        for path in save_by_threads(directory, num_ranks=num_ranks, files=NUM_FILES)
    )
    assert len(found) == len(NUM_RANKS) * len(NUM_FILES)
    # As many files as asked for, but never more than ranks; all shapes of a folder are among them.
    counts = {(path.parent.name, len(list(path.iterdir())) if path.is_dir() else 1) for path in found}
    assert ("8-ranks-4-files", 4) in counts
    assert ("3-ranks-4-files", 3) in counts
    assert ("8-ranks-1-files", 1) in counts
    return found


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_what_any_number_of_ranks_saved_is_loaded_bit_for_bit(saved: list[Path], num_ranks: int) -> None:
    expected = small_tensors()

    def load_all(world: Any) -> int:
        state = state_of(world.rank, world.num_ranks, tensors=expected)
        shards = {item.name: item for item in state.items if isinstance(item, TensorShard)}
        regions = {name: (shard.offset, tuple(shard.tensor.shape)) for name, shard in shards.items()}
        for path in saved:
            checkpoint, found = load(path, comm=world, regions=regions)
            assert checkpoint.document == state.document
            assert set(found) == set(expected)
            for name, tensor in found.items():
                wanted = shards[name].tensor if name in shards else expected[name]
                assert same_bits(tensor, wanted), (path.parent.name, name)
        return len(saved)

    assert run_threads(num_ranks, load_all, timeout_s=300) == [len(saved)] * num_ranks
