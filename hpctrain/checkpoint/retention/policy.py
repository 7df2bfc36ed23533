"""Retention policy: decides which checkpoints to delete. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Selects the checkpoint whose `metric`, in its document's `quality`, is smallest ("min") or largest ("max")."""

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
        """Parses METRIC:min or METRIC:max, such as `loss:min`. Raises UsageError for any other text."""
        metric, _, mode = text.rpartition(":")
        if not metric or mode not in ("min", "max"):
            raise UsageError(
                f"best = {text!r}: write METRIC:min or METRIC:max, such as loss:min or accuracy:max"
            )
        return cls(metric=metric, mode="min" if mode == "min" else "max")

    def among(self, quality: Mapping[int, float]) -> int | None:
        """Returns the step with the best value, the oldest of equal ones; None if there is no value other than NaN."""
        known = [(step, value) for step, value in sorted(quality.items()) if not math.isnan(value)]
        if not known:
            return None
        sign = 1.0 if self.mode == "min" else -1.0
        return min(known, key=lambda entry: sign * entry[1])[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints are kept: those that at least one of the three fields selects.

    last: the newest so many; None: all. every_steps: those whose step is a multiple of it. best: the best one by a
    metric.
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
        """Returns `keep` as a Retention. A number: keep the newest so many; None: keep all."""
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
    """Returns the steps, ascending, whose checkpoints are to be deleted after the one at `saved` is committed.

    The newest `keep.last` up to and including `saved` are kept, and `saved` always is. Steps beyond `saved` exist if
    the run resumed from an older checkpoint; they are neither counted nor deleted, since counting them could delete the
    one just saved.
    quality: values of the metric of `keep.best` by step; a step without a value is never the best.
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
