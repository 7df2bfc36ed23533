"""The doctor's findings, their levels, and the facts from which they are derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

# What one rank has found out about itself and its node: JSON values by topic (`probes.inspect_rank`).
Facts = Mapping[str, Any]


class Severity(str, Enum):
    """The level of a finding of the doctor."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        topic: What was checked.
        level: How serious the finding is.
        text: What was found.
        remedy: What to do; empty if nothing has to be done.
    """

    topic: str
    level: Severity
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return {"topic": self.topic, "level": self.level.value, "text": self.text, "remedy": self.remedy}


def ok(topic: str, text: str) -> Finding:
    return Finding(topic=topic, level=Severity.OK, text=text)


def warning(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic=topic, level=Severity.WARNING, text=text, remedy=remedy)


def problem(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic=topic, level=Severity.PROBLEM, text=text, remedy=remedy)


def worst_severity(findings: list[Finding]) -> Severity:
    """Returns the most severe level among the findings; OK if there are no findings."""
    order = (Severity.OK, Severity.WARNING, Severity.PROBLEM)
    return max((finding.level for finding in findings), key=order.index, default=Severity.OK)


def size_text(num_bytes: int) -> str:
    """Returns a size as text, such as `1.5 GB`."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
