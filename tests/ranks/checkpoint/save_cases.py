"""What each rank of the checkpoint tests runs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.checkpoint import TensorShard, load_newest_good, save
from tests.unit.checkpoint.states import same_bits, state_of, whole_tensors


def load_others_and_save(world: Any, directory: str) -> dict[str, Any]:
    """Load what earlier launches saved, on other numbers of ranks; then save with each engine.

    loaded: names of the checkpoint directories that came back bit for bit. For each engine asked for, which
    one wrote, and why.
    """
    expected = whole_tensors()
    state = state_of(world.rank, world.num_ranks)
    shards = [item for item in state.items if isinstance(item, TensorShard)]
    names = sorted(path.name for path in Path(directory).iterdir() if not path.name.endswith("auto"))
    world.barrier()
    for name in names:
        restored = load_newest_good(Path(directory) / name, comm=world)
        assert restored is not None
        for key, tensor in expected.items():
            assert same_bits(restored.tensors[key], tensor), (name, key)
        for shard in shards:
            box = restored.checkpoint.read(shard.name, offset=shard.offset, shape=tuple(shard.tensor.shape))
            assert same_bits(box, shard.tensor), (name, shard.name)
    found: dict[str, Any] = {"loaded": names}
    for engine in ("direct", "mpio", "auto"):
        place = Path(directory) / f"{world.backend}-{world.num_ranks}-{engine}"
        result = save(state, directory=place, step=5, comm=world, engine=engine)
        found[engine] = f"{result.engine.value}: {result.note}"
    return found


def save_in_groups(world: Any, directory: str) -> str:
    """Two groups of ranks save at the same time, each its own checkpoint, with MPI-IO."""
    half = world.num_ranks // 2
    groups = [list(range(half)), list(range(half, world.num_ranks))]
    group = world.split(groups)
    place = Path(directory) / f"group-of-{group.members[0]}"
    result = save(state_of(group.rank, group.num_ranks), directory=place, step=1, comm=group, engine="mpio")
    restored = load_newest_good(place, comm=group)
    assert restored is not None
    assert same_bits(restored.tensors["grid"], whole_tensors()["grid"])
    world.barrier()  # the first group to end would shut Horovod down under the other
    return str(result.path)


def digests(path: Path) -> dict[str, str]:
    """Dataset -> hash of its bytes, as h5py reads them."""
    with h5py.File(path, "r") as file:
        return {
            name: hashlib.sha256(np.asarray(dataset[()]).tobytes()).hexdigest()
            for name, dataset in file["tensors"].items()
        }
