"""What one rank does in the tests of the mesh pipeline x data x tensor: a small language model in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.comm import World
from tests.ranks.parallel.layouts import LATER, train
from tests.ranks.parallel.tensor_cases import Sentences

STAGES = {"pipeline": 2, "micro_batches": 3}
SHARDED = STAGES | {"shard": "parameters"}
SHARES = STAGES | {"shard": "optimizer"}
SPLIT = STAGES | {"tensor": 2}
# Twice as many stages as ranks of a pipeline.
INTERLEAVED = {"schedule": "interleaved", "micro_batches": 2}
ZERO_BUBBLE = {"schedule": "zero-bubble", "micro_batches": 2}
BY_NODE = SHARDED | {"shard_within": "node"}
# The layouts of each number of ranks. 61 samples in batches of 12: in the last batch of an epoch is one sample.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"none": {}, "reference": {}},
    4: {
        "pipeline x data": STAGES,
        "pipeline x shards": SHARDED | {"activation_checkpointing": "blocks"},
        "pipeline x shards, gpipe": SHARDED | {"schedule": "gpipe", "activation_checkpointing": "selective"},
        "pipeline x shards, interleaved": SHARDED | INTERLEAVED,
        "pipeline x shards, zero-bubble": SHARDED | ZERO_BUBBLE,
        "pipeline x tensor": SPLIT,
        "pipeline x tensor, interleaved": SPLIT | INTERLEAVED,
        "pipeline x tensor, zero-bubble": SPLIT | ZERO_BUBBLE,
        "pipeline x shares": SHARES,
        "of 4": {"pipeline": 4, "micro_batches": 4},
    },
    8: {
        "pipeline x data x tensor": SPLIT,
        "pipeline x shards x tensor": SPLIT | SHARDED,
        "pipeline x node x local": BY_NODE,
        "pipeline x shares": SHARES | {"activation_checkpointing": "selective"},
        "of 4 x tensor": SPLIT | {"pipeline": 4, "micro_batches": 4},
        "of 4 x shards": SHARDED | {"pipeline": 4, "micro_batches": 6},
    },
}
# Each in processes of its own: not everything that DTensor has cached of other meshes can be cleared (ADR 54).
ALONE = [(8, "of 4 x tensor")]
# Runs that are continued: by the number of ranks that continue it, the run and its new layout.
CONTINUED: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [],
    4: [("1-none", SHARDED)],
    8: [("4-pipeline x tensor", SPLIT | SHARDED), ("4-pipeline x shares", SHARES)],
    2: [
        ("4-pipeline x shards", {"tensor": 2}), ("8-pipeline x node x local", STAGES),
        ("8-pipeline x shares", {"shard": "parameters"}),
    ],
}  # fmt: skip


class Deep(Sentences):
    """Four blocks, so that two ranks can have two stages each."""

    def __init__(self, *, splits_vocabulary: bool = True) -> None:
        super().__init__(splits_vocabulary=splits_vocabulary)
        self._shape["layers"] = 4


def nodes_of(name: str, num_ranks: int) -> list[str]:
    """Two ranks on each node; those of `of 4` go round the nodes."""
    nodes = [f"n{rank // 2}" for rank in range(num_ranks)]
    return nodes if name != "of 4" else ["a", "b", "a", "b"]


def run(world: World, where: Path, name: str, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    data = {
        "train": str(where / "data"), "held_out": str(where / "data"), "global_batch": 12,
        "micro_batches": 1 if "pipeline" in layout else 2, "evaluation_batch": 12,
    }  # fmt: skip
    nodes = nodes_of(name.partition("-")[2], world.num_ranks)
    return train(world, where, name, layout, task=Deep(), nodes=nodes, data=data, **more)


def trained(world: World, directory: str) -> dict[str, Any]:
    """Trains in all layouts of so many ranks but those of ALONE, and continues what fewer have saved.

    Each training has process groups of its own, with names that those of the one before had for other ranks.
    """
    where, size = Path(directory), world.num_ranks
    found = {
        name: run(world, where, f"{size}-{name}", layout)
        for name, layout in LAYOUTS.get(size, {}).items()
        if (size, name) not in ALONE
    }
    if size == 1:
        found["later"] = run(world, where, "1-later", {}, steps=LATER)
    for name, layout in CONTINUED[size]:
        found[f"{name} continued"] = run(world, where, name, layout, steps=LATER)
    return found


def trained_alone(world: World, directory: str, name: str) -> dict[str, Any]:
    """Trains in one layout."""
    size = world.num_ranks
    return {name: run(world, Path(directory), f"{size}-{name}", LAYOUTS[size][name])}
