"""The recipe's section [parallel]."""

from __future__ import annotations

from pydantic import Field, model_validator

from hpctrain.distributed import Checkpointing, ParallelPlan, Schedule, Shard, Within
from hpctrain.errors import UsageError
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
    pipeline: int = Field(
        1,
        ge=1,
        description="Ranks over which the stages of one copy of the model are spread; the others are data parallel. "
        "The task needs the method `pipeline_layers`.",
    )
    schedule: Schedule = Field(
        "1f1b",
        description="Order of the stages' forward and backward, by torch.distributed.pipelining. `gpipe`: all forward "
        "first. `1f1b`: in turn, fewer activations are kept. `interleaved` and `zero-bubble`: two stages on each rank, "
        "less waiting; `zero-bubble` also computes gradients of weights while a rank would wait.",
    )
    micro_batches: int = Field(
        1,
        ge=1,
        description="Parts of a rank's share of the batch that go through the pipeline one after another. More of "
        "them, less waiting: 4 times `pipeline` is a good number.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ParallelSection:
        usual = ParallelPlan()
        given = [key for key in ("schedule", "micro_batches") if getattr(self, key) != getattr(usual, key)]
        if self.pipeline == 1 and given:
            raise ValueError(f"{' and '.join(given)} of a pipeline: set pipeline to 2 or more too")
        try:
            ParallelPlan(**self.model_dump())
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self
