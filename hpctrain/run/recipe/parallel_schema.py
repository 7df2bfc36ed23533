"""The recipe's section [parallel]."""

from __future__ import annotations

from pydantic import Field

from hpctrain.distributed import Checkpointing, Shard, Within
from hpctrain.run.recipe.section import Section


class ParallelSection(Section):
    """How the model is split over the ranks; see guides/parallelism.md."""

    shard: Shard = Field(
        "none",
        description="`none`: every rank holds the whole model and optimizer. `parameters`: each rank holds a part of "
        "the parameters, gradients and optimizer state (ZeRO-3), by FSDP2. Then `[reduction]` does not apply.",
    )
    shard_within: Within = Field(
        "world",
        description="`world`: parts over all ranks. `node`: over the ranks of a node, and a replica on each node "
        "(HSDP): more memory, less between nodes.",
    )
    activation_checkpointing: Checkpointing = Field(
        "none",
        description="`blocks`: of each repeated block of the model only the inputs are kept in forward; backward "
        "computes its forward again. For less memory, a third more computing.",
    )
    tensor: int = Field(
        1, ge=1,
        description="So many ranks of a node hold the parts of one layer and compute the same samples (tensor "
        "parallelism); the other ranks are data parallel. The task's `tensor_plan` says which layers are split. Then "
        "`[reduction]` does not apply.",
    )  # fmt: skip
