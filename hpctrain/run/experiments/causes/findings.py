"""`Finding`: a cause for differences, with the evidence in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from hpctrain.run.experiments.measuring.compare import Comparison, Difference

GUIDE = "docs/guides/check.md"


class Cause(str, Enum):
    """Causes, in the words of the guide. In the order in which findings are reported: earlier ones may cause later."""

    NOT_APPLIED = "nothing was trained"
    DATA_BY_RANK = "the data depend on the rank"
    REPEATED = "repeated samples"
    DATA_ORDER = "data order"
    OWN_RANDOM = "own random state"
    NOT_DETERMINISTIC = "one process is not equal to itself"
    GRADIENTS = "gradients changed after backward"
    LEARNING_RATE = "drift: learning rate"
    OPTIMIZER = "optimizer"
    DRIFT = "drift: forward changes parameters"
    BUFFER_NOT_FINITE = "a buffer: not finite after a skipped step"
    BATCH_STATISTICS = "batch statistics"
    ACCUMULATION = "wrong accumulation"
    LOSS_WEIGHTS = "loss weights"
    OWN_STATE = "state outside of the checkpoint"
    BUFFER = "a buffer"
    EVALUATION = "dropout or training mode in evaluation"
    FLOAT32 = "float32 in a float64 model"
    METRICS = "metrics are no means over samples"
    NOT_FINITE = "values that are not finite"
    RANDOM = "dropout or other randomness"
    REFUSED = "an error that not all runs have"
    UNKNOWN = "not explained"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """is_difference: False for what does not make runs differ, or is meant to. evidence: what was measured.
    is_potential: it takes other data than those that were read to see it in a run."""

    cause: Cause
    is_difference: bool
    text: str
    evidence: Sequence[str] = ()
    advice: str = ""
    is_potential: bool = False

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cause": self.cause.name.lower(), "title": self.cause.value}


def in_percent_or_power(relative: float) -> str:
    if relative == float("inf"):
        return "completely"
    return f"{100 * relative:.2g} %" if relative >= 1e-3 else f"{relative:.1e} (relative)"


def describe(difference: Difference) -> str:
    """Says from which step and tensor on, and by how much."""
    worst = (
        f", later up to {in_percent_or_power(difference.worst)}"
        if difference.worst > 2 * difference.relative
        else ""
    )
    when = f"from step {difference.step} on" if difference.step else "before the first step"
    if difference.kind == "samples":
        return f"the samples differ {when}"
    what = "the loss" if difference.kind == "loss" else f"{difference.kind} {difference.tensor}"
    if difference.kind == "initial":
        what = f"parameter {difference.tensor}"
    elif difference.kind == "option":
        what = f"the optimizer's option {difference.tensor}"
    return f"{what} differs {when}, by {in_percent_or_power(difference.relative)}{worst}"


def seen(what: str, comparison: Comparison | None) -> list[str]:
    """Returns the evidence of a comparison: [] if it was not made."""
    if comparison is None:
        return []
    if comparison.failure is not None:
        return [f"{what}: the run ends in step {comparison.failed_step}: {comparison.failure}"]
    earliest = comparison.earliest
    if earliest is None:
        return [f"{what}: equal"]
    lines = [f"{what}: {describe(earliest)}"]
    loss = comparison.first.get("loss")
    if loss is not None and earliest.kind != "loss":
        lines.append(f"{what}: {describe(loss)}")
    return lines
