"""Whether a run must stop now in order to have saved before its time is over, from the times measured so far. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import final

# A p95 over so many steps leaves the five slowest out; the first steps, which are slow, are among them.
_STEPS_REMEMBERED = 100
_OTHERS_REMEMBERED = 20


@final
class RecentTimes:
    """The newest `num_kept` of a series of durations, in seconds."""

    def __init__(self, num_kept: int) -> None:
        self._seconds: deque[float] = deque(maxlen=num_kept)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def p95(self) -> float | None:
        """Returns the smallest duration that at least 95% of them do not exceed; None before the first."""
        if not self._seconds:
            return None
        return sorted(self._seconds)[math.ceil(0.95 * len(self._seconds)) - 1]


@final
@dataclass(kw_only=True, slots=True)
class StopPlan:
    """The time that a stop takes, from the durations measured so far.

    margin_s: for what is not measured: the end of the processes, a step or save that is slower than the others.
    assumed_save_s: duration of a save until one has been measured.
    steps, saves, evaluations: what was measured; a save lasts until the checkpoint is committed.
    """

    margin_s: float
    assumed_save_s: float = 0.0
    steps: RecentTimes = field(default_factory=lambda: RecentTimes(_STEPS_REMEMBERED))
    saves: RecentTimes = field(default_factory=lambda: RecentTimes(_OTHERS_REMEMBERED))
    evaluations: RecentTimes = field(default_factory=lambda: RecentTimes(_OTHERS_REMEMBERED))

    @property
    def save_s(self) -> float:
        """Duration of a save to allow for."""
        measured_s = self.saves.p95()
        return self.assumed_save_s if measured_s is None else measured_s

    def needed_s(self, *, num_saves: int = 1, evaluates: bool = False) -> float:
        """Returns the seconds that must be left for the run to do one more step, save and end.

        num_saves: saves to be waited for, with the last one. evaluates: an evaluation comes before the next decision.
        """
        evaluation_s = (self.evaluations.p95() or 0.0) if evaluates else 0.0
        return (self.steps.p95() or 0.0) + evaluation_s + num_saves * self.save_s + self.margin_s

    def must_stop(self, time_left_s: float | None, *, num_saves: int = 1, evaluates: bool = False) -> bool:
        """Returns True if less than `needed_s` is left. time_left_s: None if there is no limit."""
        return time_left_s is not None and time_left_s < self.needed_s(
            num_saves=num_saves, evaluates=evaluates
        )
