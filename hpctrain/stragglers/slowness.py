"""What is found to be slow, and the lines that say so. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hpctrain.comm import describe_ranks
from hpctrain.telemetry import in_words

# Of more ranks or nodes that become slow at once the records have the rest.
MOST_LINES = 8


class Cause(Enum):
    """Probable cause. OTHER: work of the rank outside of input, compute and saving, such as writing its records."""

    INPUT = "input"
    COMPUTE = "compute"
    OTHER = "other"
    CHECKPOINT = "checkpoint"
    NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Ranks of one node that are slower than the others, or the links of one node, between two nodes or of all.

    value, usual: seconds of the cause in a step (checkpoint: in a save), here and as the median of all ranks; for the
    network bytes/s, here and as the median of the nodes or, if `before`, as it was earlier in the run.
    wait_s: for which the other ranks wait in each step; 0 if unknown.
    """

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    cause: Cause
    value: float
    usual: float
    wait_s: float = 0.0
    before: bool = False

    @property
    def key(self) -> tuple[tuple[int, ...], Cause]:
        return self.ranks, self.cause

    def describe(self, *, over: str) -> str:
        """Returns the line for the user. over: the steps or saves that were compared, as `the last 200 steps`."""
        if self.cause is Cause.NETWORK:
            usual = "it was" if self.before else "the median of the nodes is"
            found = (
                f"{_rate(self.value)} between {self._ends()}, {usual} {_rate(self.usual)}; all ranks wait "
                f"{_time(self.wait_s)} a step for communication"
            )
        else:
            per = "a save" if self.cause is Cause.CHECKPOINT else "a step"
            found = f"{_time(self.value)} {per}, the median of the ranks is {_time(self.usual)}, over {over}"
            if self.wait_s:
                found += f"; the others wait {_time(self.wait_s)} a step for {_pronoun(self)}"
        return f"{self._who()} {_is(self)} slow ({self.cause.value}): {found}"

    def describe_end(self) -> str:
        return f"{self._who()} {_is(self)} no longer slow ({self.cause.value})"

    def _who(self) -> str:
        nodes = ", ".join(self.nodes) if len(self.nodes) <= 2 else f"{len(self.nodes)} nodes"
        return f"{describe_ranks(self.ranks)} ({nodes})"

    def _ends(self) -> str:
        if len(self.nodes) == 1:
            return f"{self.nodes[0]} and the other nodes"
        return " and ".join(self.nodes) if len(self.nodes) == 2 else "the nodes"


@dataclass(frozen=True, slots=True)
class Change:
    """Something has become slow, or (`ended`) is no longer slow."""

    slow: Slow
    ended: bool = False


def lines_of(changes: Sequence[Change], *, over: str) -> list[str]:
    """Returns the lines for the user, at most MOST_LINES and one that says how many more there are."""
    lines = [c.slow.describe_end() if c.ended else c.slow.describe(over=over) for c in changes[:MOST_LINES]]
    if len(changes) > MOST_LINES:
        lines.append(f"{len(changes) - MOST_LINES} more of such changes are in the records only")
    return lines


def _is(slow: Slow) -> str:
    return "is" if len(slow.ranks) == 1 else "are"


def _pronoun(slow: Slow) -> str:
    return "it" if len(slow.ranks) == 1 else "them"


def _time(seconds: float) -> str:
    return in_words(seconds) if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"
