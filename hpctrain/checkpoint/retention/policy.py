"""Which checkpoints to delete: pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The checkpoint whose `metric`, as its document's `quality` has it, is the smallest or the largest."""

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
        """`loss:min`, `accuracy:max`. UsageError for anything else."""
        metric, _, mode = text.rpartition(":")
        if not metric or mode not in ("min", "max"):
            raise UsageError(
                f"best = {text!r}: write METRIC:min or METRIC:max, such as loss:min or accuracy:max"
            )
        return cls(metric=metric, mode="min" if mode == "min" else "max")

    def among(self, quality: Mapping[int, float]) -> int | None:
        """The step whose number is best; of equal ones the oldest. None: there is no number."""
        known = [(step, value) for step, value in sorted(quality.items()) if not math.isnan(value)]
        if not known:
            return None
        sign = 1.0 if self.mode == "min" else -1.0
        return min(known, key=lambda entry: sign * entry[1])[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept; a checkpoint stays when any of the three says so.

    last: so many of the newest; None: all. every_steps: those whose step it divides, for ever.
    best: the best one by a metric.
    """

    last: int | None = 3
    every_steps: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        check_keep(self.last)
        if self.every_steps is not None and self.every_steps < 1:
            raise UsageError(f"every_steps = {self.every_steps}: give a number of steps from 1 on, or none")

    @classmethod
    def of(cls, keep: Retention | int | None) -> Retention:
        """A number is short for the last so many; None for all."""
        return keep if isinstance(keep, Retention) else cls(last=keep)


def check_keep(keep: Retention | int | None) -> None:
    """Raises UsageError unless `keep` is None (all), at least 1, or a Retention, which has been checked."""
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
    """Of the checkpoints at `steps`, the ones to delete now that the one at `saved` is proven; ascending.

    The last `keep.last` up to and including `saved` stay, and `saved` always does. Steps beyond `saved` come
    from a run that went on from an older checkpoint: they are neither counted nor deleted, since counting them
    could delete the one just saved.
    quality: the metric that `keep.best` names, by step, where it is known. A step without it is never the best.
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
