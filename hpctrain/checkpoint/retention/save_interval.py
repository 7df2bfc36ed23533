"""How often to save: what a checkpoint costs against what a failure costs. Pure.

Source: J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (3), equation 37; its first order is J. W. Young 1974.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import final

from hpctrain.errors import UsageError

SECONDS_PER_DAY = 86_400.0
# Until one was measured nobody knows what a checkpoint costs: the first comes early.
FIRST_AFTER_S = 60.0
_REMEMBERED = 9


def daly_interval_s(*, cost_s: float, failure_every_s: float) -> float:
    """Seconds of training between two checkpoints that lose the least time in all.

    cost_s: for which training stands still for one checkpoint. failure_every_s: mean time between failures
    of the whole job.
    """
    if not (cost_s >= 0 and failure_every_s > 0 and math.isfinite(cost_s)):
        raise UsageError(
            f"a checkpoint costs {cost_s} s and a failure comes every {failure_every_s} s: the cost must be at "
            "least 0, the time between failures above 0"
        )
    if cost_s >= 2 * failure_every_s:
        return failure_every_s
    ratio = cost_s / (2 * failure_every_s)
    return math.sqrt(2 * cost_s * failure_every_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """interval_s: of training between two checkpoints. cost_s: training stands still for one.
    write_s: until one is committed. lost_share: of all time, by checkpoints and by work done twice."""

    interval_s: float
    cost_s: float
    write_s: float
    failure_every_s: float

    @property
    def lost_share(self) -> float:
        cycle_s = self.interval_s + self.cost_s
        if cycle_s == 0:
            return 0.0
        # What a failure destroys: half a cycle, and what was done while the last one was being written.
        behind_s = max(0.0, self.write_s - self.cost_s)
        return min(1.0, self.cost_s / cycle_s + (cycle_s / 2 + behind_s) / self.failure_every_s)

    def describe(self) -> str:
        return (
            f"a checkpoint stops training for {in_words(self.cost_s)} and a failure comes every "
            f"{in_words(self.failure_every_s)}: save every {in_words(self.interval_s)} (Young/Daly), "
            f"which loses {self.lost_share:.2%} of the time"
        )


def advise(*, cost_s: float, write_s: float, failures_per_day: float) -> Advice:
    """The interval for a measured cost. Never shorter than a write takes: the next could not begin."""
    failure_every_s = SECONDS_PER_DAY / failures_per_day if failures_per_day > 0 else math.inf
    return Advice(
        interval_s=max(
            daly_interval_s(cost_s=cost_s, failure_every_s=failure_every_s), write_s - cost_s, 0.0
        ),
        cost_s=cost_s,
        write_s=write_s,
        failure_every_s=failure_every_s,
    )


@final
class Costs:
    """What the last checkpoints of this run have cost, as this rank saw it."""

    def __init__(self) -> None:
        self._stall_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._write_s: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, *, stall_s: float, write_s: float) -> None:
        self._stall_s.append(stall_s)
        self._write_s.append(write_s)

    def advice(self, *, failures_per_day: float) -> Advice | None:
        """By the medians; None before the first checkpoint."""
        if not self._stall_s:
            return None
        return advise(
            cost_s=statistics.median(self._stall_s),
            write_s=statistics.median(self._write_s),
            failures_per_day=failures_per_day,
        )


def in_words(seconds: float) -> str:
    """`0.12 s`, `45 s`, `12 min`, `3.5 h`, `2 days`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    for unit_s, name in ((SECONDS_PER_DAY, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.0f} s"
