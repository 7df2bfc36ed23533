"""Which checkpoints a run keeps, and how often it should save. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, final

from hpctrain.errors import UsageError
from hpctrain.telemetry import in_words

# Retention policy: decides which checkpoints to delete. Pure.


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Selects the checkpoint with the best value of a metric.

    The values are those in the entry `quality` of the checkpoints' documents. Raises UsageError for an empty metric
    or an unknown mode.

    Attributes:
        metric: Name of the metric.
        mode: Whether the smallest ("min") or the largest value ("max") is best.
    """

    metric: str
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        if not self.metric or self.mode not in ("min", "max"):
            raise UsageError(
                f"best is {self.metric!r} by {self.mode!r}: name a metric, and say whether its 'min' or its 'max' "
                "is best"
            )

    @classmethod
    def parse(cls, text: str) -> Best:
        """Parses a text such as `loss:min`.

        Args:
            text: METRIC:min or METRIC:max.

        Returns:
            The metric and its mode.

        Raises:
            UsageError: For any other text.
        """
        metric, _, mode = text.rpartition(":")
        if not metric or mode not in ("min", "max"):
            raise UsageError(
                f"best = {text!r}: write METRIC:min or METRIC:max, such as loss:min or accuracy:max"
            )
        return cls(metric=metric, mode="min" if mode == "min" else "max")

    def among(self, quality: Mapping[int, float]) -> int | None:
        """Returns the step with the best value.

        If several steps have the best value, the oldest of these steps is returned. NaN is never the best.

        Args:
            quality: The metric's value by step.

        Returns:
            The step; None if there is no value other than NaN.
        """
        known = [(step, value) for step, value in sorted(quality.items()) if not math.isnan(value)]
        if not known:
            return None
        sign = 1.0 if self.mode == "min" else -1.0
        return min(known, key=lambda entry: sign * entry[1])[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints are kept: those that at least one of the fields selects.

    Attributes:
        last: Number of the newest checkpoints to keep, at least 1; None: keep all.
        every_steps: Keep the checkpoints whose step is a multiple of this number; None: this field selects none.
        best: Keep the checkpoint with the best value of a metric; None: this field selects none.
    """

    last: int | None = 3
    every_steps: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        check_keep(self.last)
        if self.every_steps is not None and self.every_steps < 1:
            raise UsageError(
                f"every_steps = {self.every_steps}: give a number of steps of at least 1, or None"
            )

    @classmethod
    def of(cls, keep: Retention | int | None) -> Retention:
        """Returns `keep` as a Retention.

        Args:
            keep: A Retention, the number of the newest checkpoints to keep, or None for all.

        Raises:
            UsageError: If the number is below 1.
        """
        return keep if isinstance(keep, Retention) else cls(last=keep)


def check_keep(keep: Retention | int | None) -> None:
    """Raises UsageError unless `keep` is None (all), an integer of at least 1, or a Retention."""
    if isinstance(keep, Retention) or keep is None:
        return
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise UsageError(f"keep = {keep}: at least the newest checkpoint must be kept (None keeps all)")


def steps_to_delete(
    steps: Iterable[int],
    *,
    saved: int,
    keep: Retention | int | None,
    quality: Mapping[int, float] | None = None,
) -> list[int]:
    """Returns, ascending, the steps whose checkpoints are to be deleted after the commit of step `saved`.

    Of the steps up to `saved` the newest `keep.last` are kept, always including `saved`. Steps beyond `saved` exist
    if the run resumed from an older checkpoint. Such steps are neither counted nor deleted: if they were counted, the
    checkpoint just saved could be deleted. `quality` contains the values of the metric of `keep.best` by step; a step
    without a value is never the best.
    """
    retention = Retention.of(keep)
    if retention.last is None:
        return []
    past = sorted(step for step in set(steps) if step <= saved)
    kept = {saved, *past[-retention.last :]}
    if retention.every_steps is not None:
        kept |= {step for step in past if step % retention.every_steps == 0}
    if retention.best is not None:
        best = retention.best.among({s: v for s, v in (quality or {}).items() if s in past})
        kept |= {best} if best is not None else set()
    return [step for step in past if step not in kept]


# How often to save: the interval that balances the cost of checkpoints against the cost of failures. Pure.
#
# Source: J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
# Future Generation Computer Systems 22 (3), equation 37; its first order is J. W. Young 1974.


SECONDS_PER_DAY = 86_400.0
# The first checkpoint is early, since the cost is unknown until one has been measured.
FIRST_AFTER_S = 60.0
_REMEMBERED = 9


def daly_interval_s(*, cost_s: float, failure_every_s: float) -> float:
    """Returns the training time between two checkpoints that minimizes the lost time, in seconds.

    `cost_s` is the time for which training waits per checkpoint, `failure_every_s` the mean time between failures of
    the whole job. Raises UsageError if an argument is out of range. Source: Daly 2006, equation 37.
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
class IntervalAdvice:
    """The recommended save interval, and the measurements from which the interval follows, in seconds.

    Attributes:
        interval_s: Training time between two checkpoints.
        cost_s: Time for which training waits per checkpoint.
        write_s: Time from the start of a save to its commit.
        failure_every_s: Mean time between failures of the whole job.
        lost_share: Fraction of the total time that is lost by waiting for checkpoints and by repeating work.
    """

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


def advise(*, cost_s: float, write_s: float, failures_per_day: float) -> IntervalAdvice:
    """Returns the recommended interval between checkpoints, computed from measured times.

    `cost_s` is the time for which training waits per checkpoint, and `write_s` the time from the start of a save to its
    commit. The interval is at least `write_s - cost_s`, the time for which a save continues while training runs, since
    only one save can be in progress.
    """
    failure_every_s = SECONDS_PER_DAY / failures_per_day if failures_per_day > 0 else math.inf
    return IntervalAdvice(
        interval_s=max(
            daly_interval_s(cost_s=cost_s, failure_every_s=failure_every_s), write_s - cost_s, 0.0
        ),
        cost_s=cost_s,
        write_s=write_s,
        failure_every_s=failure_every_s,
    )


@final
class Costs:
    """Measured costs of this run's most recent checkpoints, on this rank."""

    def __init__(self) -> None:
        self._stall_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._write_s: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, *, stall_s: float, write_s: float) -> None:
        self._stall_s.append(stall_s)
        self._write_s.append(write_s)

    def advice(self, *, failures_per_day: float) -> IntervalAdvice | None:
        """Returns the recommended interval between checkpoints; None before the first checkpoint.

        The interval is computed from the medians of the measured costs, and from the number of failures per day.
        """
        if not self._stall_s:
            return None
        return advise(
            cost_s=statistics.median(self._stall_s),
            write_s=statistics.median(self._write_s),
            failures_per_day=failures_per_day,
        )
