"""The schema of the recipe's key `reduction.schedule`: when ranks synchronise, and how."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from hpctrain.errors import UsageError
from hpctrain.reduce import AUTO, Schedule, needs_feedback, parse_schedule
from hpctrain.run.recipe.parallel_schema import ParallelSection
from hpctrain.run.recipe.sections import RecipeSection

_EVERY = "Number of steps from one synchronisation to the next."
_FROM_STEP = "Number of synchronous steps at the start of the run, before the method begins."
_WIRE = (
    "Wire format of the changes of the parameters that are averaged, with error feedback where the format needs it: "
    "`fp32`, `fp16`, `bf16` or `int8`. The gradients of synchronous steps have `reduction.wire`."
)


class _Schedule(RecipeSection):
    """Base class of the methods. `plain` returns the value without pydantic, which the updaters take."""

    @model_validator(mode="after")
    def _is_valid(self) -> _Schedule:
        try:
            self.plain()
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self

    def plain(self) -> Schedule:
        found = parse_schedule(self.model_dump())
        assert found is not None
        return found


class LocalSgdSection(_Schedule):
    """Local SGD: each rank updates its own parameters, and the ranks average them every `every` steps."""

    method: Literal["local-sgd"]
    every: int = Field(ge=1, description=_EVERY)
    from_step: int = Field(0, ge=0, description=_FROM_STEP + " More than 0: post-local SGD.")
    wire: str = Field("fp32", description=_WIRE)


class DiLoCoSection(_Schedule):
    """DiLoCo: local steps, and every `every` steps an outer Nesterov SGD on the mean change of the parameters."""

    method: Literal["diloco"]
    every: int = Field(ge=1, description=_EVERY)
    outer_lr: float = Field(0.7, gt=0, description="Learning rate of the outer optimizer.")
    outer_momentum: float = Field(
        0.9, ge=0, lt=1, description="Nesterov momentum of the outer optimizer. 0: without."
    )
    from_step: int = Field(0, ge=0, description=_FROM_STEP)
    wire: str = Field("fp32", description=_WIRE)


class DasoSection(_Schedule):
    """DASO: the ranks of a node sum gradients in each step, and nodes average parameters while the next steps run."""

    method: Literal["daso"]
    every: int = Field(ge=1, description=_EVERY)
    wait: int = Field(
        1,
        ge=0,
        description="Number of steps that run while an average is on its way between nodes. Below `every`.",
    )
    from_step: int = Field(0, ge=0, description=_FROM_STEP)
    wire: str = Field("fp32", description=_WIRE)


class AdasumSection(_Schedule):
    """Adasum: in each step gradients are combined by a rule that adds what differs, instead of by a mean."""

    method: Literal["adasum"]
    within_node: Literal["adasum", "mean"] = Field(
        "adasum",
        description="`adasum`: the gradients of all ranks are combined by Adasum. `mean`: the ranks of a node average "
        "their gradients, and Adasum combines the means of the nodes.",
    )


ScheduleSection: TypeAlias = Annotated[
    LocalSgdSection | DiLoCoSection | DasoSection | AdasumSection, Field(discriminator="method")
]


def check_adasum(schedule: ScheduleSection, *, parallel: ParallelSection, algorithm: str, wire: str) -> None:
    """Raises ValueError if `schedule` is Adasum, and settings of other sections cannot be combined with it.

    Args:
        parallel: The section `[parallel]`.
        algorithm: The value of `reduction.algorithm`.
        wire: The value of `reduction.wire`.
    """
    if not isinstance(schedule, AdasumSection):
        return
    what = "reduction.schedule = 'adasum' cannot be combined with"
    usual = ParallelSection()
    split = [k for k in ("shard", "tensor", "pipeline") if getattr(parallel, k) != getattr(usual, k)]
    if split:
        raise ValueError(
            f"{what} parallel.{split[0]} = {getattr(parallel, split[0])!r}: Adasum needs the whole gradient of each "
            "parameter on every rank; leave one of them out"
        )
    if algorithm != "auto" or wire != "fp32":
        key = f"algorithm = {algorithm!r}" if algorithm != "auto" else f"wire = {wire!r}"
        raise ValueError(
            f"{what} reduction.{key}, which is for sums: Adasum sends float32 between all ranks, or between nodes with "
            "within_node = 'mean'; leave it out"
        )


def check_schedule(
    schedule: ScheduleSection, *, shard: str, sync_batch_norm: bool, wire: str, ema: float | None
) -> None:
    """Raises ValueError if settings of other sections cannot be combined with the schedule.

    Args:
        shard: The value of `parallel.shard`.
        sync_batch_norm: The value of `reduction.sync_batch_norm`.
        wire: The value of `reduction.wire`.
        ema: The value of `optimizer.ema`.
    """
    if isinstance(schedule, AdasumSection):
        return  # see `check_adasum`
    asked = f"reduction.schedule = {schedule.method!r} cannot be combined with"
    if shard != "none":
        raise ValueError(
            f"{asked} parallel.shard = {shard!r}: each worker steps alone, and needs the whole model and optimizer; "
            "leave one of them out"
        )
    if sync_batch_norm:
        raise ValueError(
            f"{asked} reduction.sync_batch_norm, which waits for all ranks in each forward; leave one of them out"
        )
    if ema is not None:
        raise ValueError(
            f"{asked} optimizer.ema, which averages the parameters of each step: they differ between workers; leave "
            "one of them out"
        )
    if wire == AUTO or needs_feedback(wire):
        raise ValueError(
            f"{asked} reduction.wire = {wire!r}, which is the format of the gradients of synchronous steps: use fp32, "
            "fp16 or bf16 there. The format of the averages is reduction.schedule.wire"
        )
