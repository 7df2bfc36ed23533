"""`LikelyCause`, a cause of differences with its evidence as text, and `CheckReport`, the result of a check."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from hpctrain.run.experiments.causes.observations import Observations
from hpctrain.run.experiments.measuring.trace import FirstDifference, TrialComparison

GUIDE = "docs/guides/check.md"


class Cause(str, Enum):
    """The causes, named as in the guide, in the order of the report: an earlier cause may produce a later cause."""

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
    METRICS = "metrics are not means over samples"
    NOT_FINITE = "values that are not finite"
    RANDOM = "dropout or other randomness"
    REFUSED = "an error that not all runs have"
    UNKNOWN = "not explained"


@dataclass(frozen=True, kw_only=True, slots=True)
class LikelyCause:
    """A cause with its evidence.

    Attributes:
        is_difference: False for a cause that makes no runs differ, or is intended.
        text: What was found.
        evidence: What was measured.
        advice: What to do.
        is_potential: Whether the cause makes runs differ only with data other than the data that were read.
    """

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


def describe_difference(difference: FirstDifference) -> str:
    """Returns text that says in what two runs differ, from which step on, and by how much."""
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


def seen(what: str, comparison: TrialComparison | None) -> list[str]:
    """Returns lines of text about the result of the comparison `what`; [] if the comparison was not made."""
    if comparison is None:
        return []
    if comparison.failure is not None:
        return [f"{what}: the run ends in step {comparison.failed_step}: {comparison.failure}"]
    earliest = comparison.earliest
    if earliest is None:
        return [f"{what}: equal"]
    lines = [f"{what}: {describe_difference(earliest)}"]
    loss = comparison.first.get("loss")
    if loss is not None and earliest.kind != "loss":
        lines.append(f"{what}: {describe_difference(loss)}")
    return lines


# `CheckReport`: what a check found, in words and as JSON.


_WIDTH = 118


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The result of a check, the same on every rank.

    findings: the causes, the most probable first, and notes that are not differences.
    """

    name: str
    observations: Observations
    findings: Sequence[LikelyCause]

    @property
    def equal(self) -> bool:
        """True if nothing differs that should be equal."""
        return not any(finding.is_difference for finding in self.findings)

    def lines(self) -> list[str]:
        return list(self._lines())

    def _lines(self) -> Iterator[str]:
        seen = self.observations
        dtype = "float64" if seen.double else "float32 (it does not run in float64)"
        yield f"{self.name}: {seen.steps} steps in {dtype}, on 1 rank and on {seen.num_ranks}"
        for what, comparison in seen.compared().items():
            result = f"equal within {seen.tolerance:.0e}" if comparison.equal else "differs"
            if (
                comparison.failure is None
                and comparison.steps
                and not comparison.applied
                and not comparison.expected
            ):
                result = "no step was applied"
            elif comparison.failure is not None:
                result = f"ends in step {comparison.failed_step} with {comparison.failure.split(':')[0]}"
            elif comparison.equal and comparison.worst == 0:
                result = "equal to the bit"
            elif not comparison.equal:
                result += f", by up to {comparison.worst:.1e}"
            yield f"  {what:<34} {result}"
        if seen.evaluation is not None:
            same = "differs" if seen.evaluation.differs or seen.evaluation.changed else "equal"
            yield f"  {'evaluation, repeated':<34} {same}"
        differences = [finding for finding in self.findings if finding.is_difference]
        for number, finding in enumerate(differences, start=1):
            yield ""
            yield f"{'cause' if len(differences) == 1 else f'cause {number}'}: {finding.cause.value}"
            yield from _wrapped(finding.text)
            for line in finding.evidence:
                yield from _wrapped(line, bullet="- ")
            if finding.advice:
                yield from _wrapped(f"what to do: {finding.advice}")
        for finding in self.findings:
            if not finding.is_difference:
                yield ""
                yield from _wrapped(f"note: {finding.cause.value}: {finding.text}", indent="")
        yield ""
        if self.equal:
            yield f"equal within {seen.tolerance:.0e}"
        elif seen.is_idle:
            yield f"nothing was compared, since no step was applied; each cause has an example in {GUIDE}"
        else:
            yield f"something differs; each cause has an example in {GUIDE}"

    def as_json(self) -> dict[str, Any]:
        seen = self.observations
        return {
            "name": self.name,
            "equal": self.equal,
            "ranks": seen.num_ranks,
            "steps": seen.steps,
            "precision": "fp64" if seen.double else "fp32",
            "tolerance": seen.tolerance,
            "findings": [finding.as_json() for finding in self.findings],
            "compared": {
                what: {"equal": found.equal, "worst": _json_number(found.worst), "failure": found.failure}
                for what, found in seen.compared().items()
            },
        }


def _json_number(value: float) -> float | str:
    return value if abs(value) != float("inf") else str(value)


def _wrapped(text: str, *, bullet: str = "", indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{indent}{bullet}", subsequent_indent=f"{indent}{' ' * len(bullet)}",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
