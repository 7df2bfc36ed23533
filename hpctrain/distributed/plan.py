"""How a model is split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from hpctrain.errors import UsageError

Shard: TypeAlias = Literal["none", "parameters"]
Within: TypeAlias = Literal["world", "node"]
Checkpointing: TypeAlias = Literal["none", "blocks"]
Schedule: TypeAlias = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]

# Schedules whose ranks r have the stages r and r + pipeline.
_OF_TWO_STAGES = ("interleaved", "zero-bubble")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """How a model is split.

    shard: `none`, every rank holds all of it; `parameters`, each rank holds a part of the parameters, gradients and
    optimizer state (ZeRO-3). shard_within: parts over all ranks (`world`), or over the ranks of a node, with a replica
    on each node (`node`, HSDP). activation_checkpointing: of the repeated `blocks`, or `none`. pipeline: ranks that
    hold the stages of one copy, 1 for none; schedule, micro_batches: of the pipeline.
    Raises UsageError for other values.
    """

    shard: Shard = "none"
    shard_within: Within = "world"
    activation_checkpointing: Checkpointing = "none"
    pipeline: int = 1
    schedule: Schedule = "1f1b"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        given = (self.shard, self.shard_within, self.activation_checkpointing, self.schedule)
        names = ("shard", "shard_within", "activation_checkpointing", "schedule")
        for name, value, kind in zip(names, given, (Shard, Within, Checkpointing, Schedule), strict=True):
            if value not in get_args(kind):
                raise UsageError(f"{name} is {value!r}: choose {' or '.join(get_args(kind))}")
        for name, number in (("pipeline", self.pipeline), ("micro_batches", self.micro_batches)):
            if number < 1:
                raise UsageError(f"{name} is {number}: give at least 1")
        if self.pipeline > 1:
            self._check_pipeline()

    @property
    def stages_per_rank(self) -> int:
        """Stages of a pipeline on each of its ranks."""
        return 2 if self.schedule in _OF_TWO_STAGES else 1

    def _check_pipeline(self) -> None:
        if self.shard != "none":
            raise UsageError(
                f"pipeline = {self.pipeline} cannot be combined with shard = {self.shard!r} yet: each rank holds its "
                "stages whole. Leave one of them out"
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
