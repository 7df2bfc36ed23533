"""What each rank of the reshape tests runs in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.checkpoint import TensorShard, load, save
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors


def load_and_save(world: Any, paths: list[str], directory: str) -> dict[str, int]:
    """Load all of `paths` and save 1 to 4 files under `directory`; how many of each."""
    loaded = load_all(world, paths)
    state = state_of(world.rank, world.num_ranks)
    for num_files in range(1, 5):
        save(state, directory=Path(directory) / f"{num_files}-files", step=1, comm=world, files=num_files)
    return {"loaded": loaded, "saved": 4}


def load_all(world: Any, paths: list[str]) -> int:
    """Load each of them with this rank's shards as regions, and compare every bit with the truth."""
    for path in paths:
        tensors = whole_tensors()
        _, whole = load(path, comm=world)
        for name in ("large", "model/layer.0/weight"):  # some states hold only their first rows
            tensors[name] = tensors[name][: whole[name].shape[0]]
        assert set(whole) == set(tensors)
        for name, tensor in whole.items():
            assert same_bits(tensor, tensors[name]), (path, name)
        state = state_of(world.rank, world.num_ranks, tensors=tensors)
        shards = [item for item in state.items if isinstance(item, TensorShard)]
        regions = {shard.name: (shard.offset, tuple(shard.tensor.shape)) for shard in shards}
        _, parts = load(path, comm=world, regions=regions)
        for name, (offset, shape) in regions.items():
            index = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            assert same_bits(parts[name], tensors[name][index]), (path, name)
    return len(paths)
