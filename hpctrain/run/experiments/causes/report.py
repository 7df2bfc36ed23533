"""`CheckReport`: what a check found, in words and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.run.experiments.causes.findings import GUIDE, Finding
from hpctrain.run.experiments.causes.observations import Observations

_WIDTH = 118


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The result of a check, the same on every rank. findings: the most probable cause first; also notes, which are no
    differences."""

    name: str
    observations: Observations
    findings: Sequence[Finding]

    @property
    def equal(self) -> bool:
        """Whether nothing differs that should not."""
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
