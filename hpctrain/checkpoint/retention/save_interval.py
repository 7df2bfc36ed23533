"""How often to save: the interval that balances the cost of checkpoints against the cost of failures. Pure.

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
from hpctrain.telemetry import in_words

SECONDS_PER_DAY = 86_400.0
# The first checkpoint is early, since the cost is unknown until one has been measured.
FIRST_AFTER_S = 60.0
_REMEMBERED = 9


def daly_interval_s(*, cost_s: float, failure_every_s: float) -> float:
    """Returns the time of training between two checkpoints that minimizes the lost time, in seconds.

    cost_s: time that training waits for one checkpoint. failure_every_s: mean time between failures of the whole job.
    Raises UsageError if one is out of range.
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
    """Recommended save interval. interval_s: time of training between two checkpoints. cost_s: time that training waits
    for one. write_s: time until one is committed. failure_every_s: mean time between failures. lost_share: fraction of
    the total time lost by waiting for checkpoints and by repeated work."""

    interval_s: float
    cost_s: float
    write_s: float
    failure_every_s: float

    @property
    def lost_share(self) -> float:
        cycle_s = self.interval_s + self.cost_s
        if cycle_s == 0:
            return 0.0
        # A failure loses half a cycle on average, and the work done while the last checkpoint was being written.
        drain_s = max(0.0, self.write_s - self.cost_s)
        return min(1.0, self.cost_s / cycle_s + (cycle_s / 2 + drain_s) / self.failure_every_s)

    def describe(self) -> str:
        return (
            f"a checkpoint stops training for {in_words(self.cost_s)} and a failure comes every "
            f"{in_words(self.failure_every_s)}: save every {in_words(self.interval_s)} (Young/Daly), "
            f"which loses {self.lost_share:.2%} of the time"
        )


def advise(*, cost_s: float, write_s: float, failures_per_day: float) -> Advice:
    """Returns the interval for measured times, in seconds. It is never shorter than a write, since only one save can be
    in flight."""
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
    """Costs of the most recent checkpoints of this run, measured on this rank."""

    def __init__(self) -> None:
        self._stall_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._write_s: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, *, stall_s: float, write_s: float) -> None:
        self._stall_s.append(stall_s)
        self._write_s.append(write_s)

    def advice(self, *, failures_per_day: float) -> Advice | None:
        """Returns the advice for the median costs; None before the first checkpoint."""
        if not self._stall_s:
            return None
        return advise(
            cost_s=statistics.median(self._stall_s),
            write_s=statistics.median(self._write_s),
            failures_per_day=failures_per_day,
        )
