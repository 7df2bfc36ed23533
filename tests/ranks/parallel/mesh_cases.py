"""What one rank does in the tests of the mesh pipeline x data x tensor: a small language model in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.comm import World
from tests.ranks.parallel.layouts import Family, Found, Launch, Layout, train
from tests.ranks.parallel.tensor_cases import Sentences

STAGES = {"pipeline": 2, "micro_batches": 3}
SHARDED = STAGES | {"shard": "parameters"}
SHARES = STAGES | {"shard": "optimizer"}
SPLIT = STAGES | {"tensor": 2}
# Twice as many stages as ranks of a pipeline.
INTERLEAVED = {"schedule": "interleaved", "micro_batches": 2}
ZERO_BUBBLE = {"schedule": "zero-bubble", "micro_batches": 2}
BY_NODE = SHARDED | {"shard_within": "node"}


class Deep(Sentences):
    """Four blocks, so that two ranks can have two stages each."""

    def __init__(self, *, splits_vocabulary: bool = True) -> None:
        super().__init__(splits_vocabulary=splits_vocabulary)
        self._shape["layers"] = 4


def nodes_of(name: str, num_ranks: int) -> list[str]:
    """Two ranks on each node; those of `of 4` go round the nodes."""
    nodes = [f"n{rank // 2}" for rank in range(num_ranks)]
    return nodes if name != "of 4" else ["a", "b", "a", "b"]


def run(world: World, where: Path, name: str, layout: Layout, **more: Any) -> Found:
    nodes = nodes_of(name.partition("-")[2], world.num_ranks)
    return train(world, where, name, layout, task=Deep(), nodes=nodes, **more)


# 61 samples in batches of 12: in the last batch of an epoch is one sample. Each training has process groups of its own,
# with names that those of the one before had for other ranks.
FAMILY = Family(
    cases=__name__,
    train=run,
    reference="1-reference",
    launches=[
        Launch(ranks=1, layouts={"none": {}, "reference": {}}),
        Launch(
            ranks=4,
            layouts={
                "pipeline x data": STAGES,
                "pipeline x shards": SHARDED | {"activation_checkpointing": "blocks"},
                "pipeline x shards, gpipe": SHARDED
                | {"schedule": "gpipe", "activation_checkpointing": "selective"},
                "pipeline x shards, interleaved": SHARDED | INTERLEAVED,
                "pipeline x shards, zero-bubble": SHARDED | ZERO_BUBBLE,
                "pipeline x tensor": SPLIT,
                "pipeline x tensor, interleaved": SPLIT | INTERLEAVED,
                "pipeline x tensor, zero-bubble": SPLIT | ZERO_BUBBLE,
                "pipeline x shares": SHARES,
                "of 4": {"pipeline": 4, "micro_batches": 4},
            },
            continued={"1-none": SHARDED},
        ),
        Launch(
            ranks=8,
            layouts={
                "pipeline x data x tensor": SPLIT,
                "pipeline x shards x tensor": SPLIT | SHARDED,
                "pipeline x node x local": BY_NODE,
                "pipeline x shares": SHARES | {"activation_checkpointing": "selective"},
                "of 4 x shards": SHARDED | {"pipeline": 4, "micro_batches": 6},
            },
            continued={"4-pipeline x tensor": SPLIT | SHARDED, "4-pipeline x shares": SHARES},
        ),
        # In processes of its own: not everything that DTensor has cached of other meshes can be cleared (ADR 54).
        Launch(ranks=8, layouts={"of 4 x tensor": SPLIT | {"pipeline": 4, "micro_batches": 4}}),
        Launch(
            ranks=2,
            continued={
                "4-pipeline x shards": {"tensor": 2},
                "8-pipeline x node x local": STAGES,
                "8-pipeline x shares": {"shard": "parameters"},
            },
        ),
    ],
)
