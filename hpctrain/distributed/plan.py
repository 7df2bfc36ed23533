"""The settings that say how a model is split over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from hpctrain.errors import UsageError

ShardKind: TypeAlias = Literal["none", "optimizer", "gradients", "parameters"]
Within: TypeAlias = Literal["world", "node"]
Recomputation: TypeAlias = Literal["none", "blocks", "selective"]
PipelineSchedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
# How each module is split, by name, possibly with the number of parts that are not cut; see `TensorParallelTask`.
TensorPlan: TypeAlias = Mapping[str, str | tuple[str, int]]

# Schedules in which rank r of a pipeline has the stages r and r + pipeline.
_OF_TWO_STAGES = ("interleaved", "zero-bubble")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """How a model is split over the ranks, for `session.parallelize`.

    Attributes:
        shard: What is sharded over the data-parallel ranks. `none`: nothing, every rank holds the whole model.
            `optimizer`: the optimizer state (ZeRO-1). `gradients`: the gradients too (ZeRO-2). `parameters`: the
            parameters too (ZeRO-3).
        shard_within: The ranks that share one set of shards. `world`: all ranks. `node`: the ranks of a node, with a
            replica on each node (HSDP), for sharded parameters only.
        activation_checkpointing: Which activations are dropped in forward and recomputed in backward. `none`: none.
            `blocks`: all inside the repeated blocks. `selective`: all but the results of matrix products, convolutions
            and attention.
        blocks: Names of the modules that are sharded and recomputed one at a time, such as `encoder.layers.*`; `*`
            stands for any text without a dot. Empty: the repeated blocks that are found in the model.
        tensor: The number of ranks of a node that share each layer and compute the same samples (tensor parallelism).
        tensor_plan: How each module is split over the tensor-parallel ranks, by the name of the module; see
            `TensorParallelTask.tensor_plan`.
        sequence: Whether each tensor-parallel rank computes only a part of the sequence between split layers.
        offload: Whether a GPU's shards of parameters, gradients and optimizer state are kept in host memory. For
            sharded parameters only.
        pipeline: The number of ranks that hold the stages of one copy of the model; 1: no pipeline.
        schedule: The schedule of the pipeline.
        micro_batches: The number of micro-batches per step in the pipeline.

    Raises:
        UsageError: For an invalid value, or values that cannot be combined.
    """

    shard: ShardKind = "none"
    shard_within: Within = "world"
    activation_checkpointing: Recomputation = "none"
    blocks: Sequence[str] = ()
    tensor: int = 1
    tensor_plan: TensorPlan = field(default_factory=dict)
    sequence: bool = False
    offload: bool = False
    pipeline: int = 1
    schedule: PipelineSchedule = "1f1b"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        given = (self.shard, self.shard_within, self.activation_checkpointing, self.schedule)
        names = ("shard", "shard_within", "activation_checkpointing", "schedule")
        for name, value, kind in zip(
            names, given, (ShardKind, Within, Recomputation, PipelineSchedule), strict=True
        ):
            if value not in get_args(kind):
                raise UsageError(f"{name} is {value!r}: choose {' or '.join(get_args(kind))}")
        for name, number in (("pipeline", self.pipeline), ("micro_batches", self.micro_batches)):
            if number < 1:
                raise UsageError(f"{name} is {number}: give at least 1")
        if self.pipeline > 1:
            self._check_pipeline()
        if self.shard_within == "node" and self.shard != "parameters":
            raise UsageError(
                f"shard_within is 'node' with shard = {self.shard!r}: only sharded parameters can be kept within a "
                "node. Leave shard_within out, or use shard = 'parameters'"
            )
        self._check_tensor()
        self._check_offload()

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that each rank holds."""
        return 2 if self.schedule in _OF_TWO_STAGES else 1

    def _check_tensor(self) -> None:
        if self.tensor < 1:
            raise UsageError(
                f"tensor is {self.tensor}: give the number of ranks that hold one layer, at least 1"
            )
        if self.tensor > 1 and not self.tensor_plan:
            raise UsageError(
                f"tensor = {self.tensor} needs a tensor_plan, which says how modules are split, such as "
                "{'blocks.*.up': 'column', 'blocks.*.down': 'row'}"
            )
        if self.tensor > 1 and self.shard not in ("none", "parameters"):
            raise UsageError(
                f"tensor = {self.tensor} cannot be combined with shard = {self.shard!r}: use 'none' or 'parameters'"
            )
        if self.sequence and self.tensor == 1:
            raise UsageError(
                "sequence = true splits sequences over the ranks that hold one layer's parts: set tensor to 2 or more, "
                "or leave sequence out"
            )

    def _check_offload(self) -> None:
        if self.offload and self.shard != "parameters":
            raise UsageError(
                f"offload = true with shard = {self.shard!r}: only sharded parameters can be kept in host memory. Use "
                "shard = 'parameters', or leave offload out"
            )
        if self.offload and self.tensor > 1:
            raise UsageError(
                f"offload = true cannot be combined with tensor = {self.tensor} yet: leave one of them out"
            )

    def _check_pipeline(self) -> None:
        if self.shard == "gradients":
            raise UsageError(
                f"pipeline = {self.pipeline} with shard = 'gradients' would save no memory over 'optimizer': a stage "
                "adds up whole gradients until its last micro-batch, and then each rank keeps only its share with both "
                "settings. Use 'optimizer'"
            )
        if self.activation_checkpointing == "selective" and self.schedule == "zero-bubble":
            raise UsageError(
                "schedule = 'zero-bubble' goes backward through each block twice, for its inputs and for its weights, "
                "which PyTorch does not allow with activation_checkpointing = 'selective': use another schedule"
            )
        for name in ("sequence", "offload"):
            if getattr(self, name):
                raise UsageError(
                    f"pipeline = {self.pipeline} cannot be combined with {name} = true yet: leave one of the two out"
                )
        if self.schedule == "1f1b" and self.micro_batches < self.pipeline:
            raise UsageError(
                f"micro_batches = {self.micro_batches} with pipeline = {self.pipeline}: schedule = '1f1b' needs at "
                f"least {self.pipeline} micro-batches; {4 * self.pipeline} keep the stages busy"
            )
        if self.schedule in _OF_TWO_STAGES and self.micro_batches % self.pipeline:
            raise UsageError(
                f"micro_batches = {self.micro_batches} with pipeline = {self.pipeline}: schedule = {self.schedule!r} "
                f"needs a multiple of {self.pipeline} micro-batches"
            )
