"""The recipe's section [parallel]."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from hpctrain.distributed import Checkpointing, Shard, Within
from hpctrain.reduce import SHARDED_ALGORITHMS, SHARDED_WIRES
from hpctrain.run.recipe.section import Section


class ParallelSection(Section):
    """How the model is split over the ranks; see guides/parallelism.md."""

    shard: Shard = Field(
        "none",
        description="`none`: every rank holds the whole model and optimizer. `optimizer`: each rank holds a part of "
        "the optimizer state (ZeRO-1). `gradients`: of the gradients too (ZeRO-2). `parameters`: of the parameters too "
        "(ZeRO-3), by FSDP2; then `[reduction]` has `algorithm` (`auto`, `direct`, `hierarchical`) and `wire` (`fp32`, "
        "`fp16`, `bf16`, `int8`) only.",
    )
    shard_within: Within = Field(
        "world",
        description="`world`: parts over all ranks. `node`: over the ranks of a node, and a replica on each node "
        "(HSDP): more memory, less between nodes.",
    )
    activation_checkpointing: Checkpointing = Field(
        "none",
        description="`blocks`: of each repeated block of the model only the inputs are kept in forward; backward "
        "computes its forward again. For less memory, a third more computing. `selective`: results of matrix "
        "products, convolutions and attention are kept as well, and only the rest is computed again.",
    )
    tensor: int = Field(
        1, ge=1,
        description="So many ranks of a node hold the parts of one layer and compute the same samples (tensor "
        "parallelism); the other ranks are data parallel. The task's `tensor_plan` says which layers are split. Then "
        "`[reduction]` does not apply.",
    )  # fmt: skip


def check_sharded_reduction(*, algorithm: str, wire: str, others: Sequence[str], within: Within) -> None:
    """Raises ValueError for keys of [reduction] that FSDP2, which reduces sharded gradients, does not follow.

    others: keys that are set besides algorithm and wire.
    """
    for key, value, known in (
        ("algorithm", algorithm, SHARDED_ALGORITHMS),
        ("wire", wire, SHARDED_WIRES),
    ):
        if value not in known:
            raise ValueError(
                f"reduction.{key} = {value!r}: with parallel.shard = 'parameters' FSDP2 reduces the gradients; choose "
                f"one of {', '.join(known)}"
            )
    if others:
        raise ValueError(
            f"reduction.{', reduction.'.join(others)}: with parallel.shard = 'parameters' FSDP2 reduces each block's "
            "gradients at once, and nothing is measured; leave all keys but algorithm and wire out"
        )
    if within == "node" and algorithm == "direct":
        raise ValueError(
            "reduction.algorithm = 'direct': shards within a node are summed there first; choose hierarchical or auto, "
            "or parallel.shard_within = 'world'"
        )
