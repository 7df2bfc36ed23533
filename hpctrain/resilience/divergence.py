"""Response to divergence: which steps are dropped, when the run is rolled back, and when it ends. Pure.

    ok -> skip -> roll back, with a lower learning rate -> give up

All decisions follow from numbers that are summed over the ranks, so all ranks decide alike without further messages.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from hpctrain.errors import DivergedError

# Factor from the median absolute deviation to the standard deviation of a normal distribution.
_MAD_TO_STD = 1.4826
# Smallest standard deviation, as a fraction of the loss: for losses that hardly vary, any change would be a jump.
_LEAST_STD = 0.02
# Fraction by which a bound must hold, since logarithms are rounded.
_MARGIN = 1e-6
_LARGEST_LOG = 700.0  # of a float64, rounded down


def robust_z(loss: float, recent: Sequence[float]) -> float:
    """Returns how many robust standard deviations `loss` is above the median of `recent`.

    If all values are positive, their logarithms are compared, since losses near zero vary over powers of ten. Source
    of the estimate of the standard deviation (1.4826 MAD): Rousseeuw and Croux 1993,
    doi:10.1080/01621459.1993.10476408.
    """
    values = sorted(recent)
    if loss > 0 and values[0] > 0:
        values, loss, least = [math.log(value) for value in values], math.log(loss), _LEAST_STD
        median = _middle(values)
    else:
        median = _middle(values)
        least = _LEAST_STD * abs(median) or math.ulp(1.0)
    deviation = _middle(sorted(abs(value - median) for value in values))
    return (loss - median) / max(_MAD_TO_STD * deviation, least)


def cannot_jump(loss: float, recent: Sequence[float], *, limit: float) -> bool:
    """Returns True if `robust_z(loss, recent)` is certainly below `limit`, which is above 0.

    Takes a time that grows with the logarithm of the number of losses. False means that `robust_z` must be computed.

    recent: sorted in ascending order.
    """
    if loss <= 0 or recent[0] <= 0:
        return False
    half = len(recent) // 2
    median = (math.log(recent[half]) + math.log(recent[half if len(recent) % 2 else half - 1])) / 2
    above = math.log(loss) - median
    if above < (1 - _MARGIN) * limit * _LEAST_STD:
        return True
    # The deviation, half of the losses' distances from the median, is at least `near` if less than half are nearer.
    near = (1 + _MARGIN) * above / (limit * _MAD_TO_STD)
    low = bisect_left(recent, math.exp(median - near))
    high = bisect_right(recent, math.exp(median + near)) if median + near < _LARGEST_LOG else len(recent)
    return high - low < half


def _middle(values: Sequence[float]) -> float:
    """Returns the median of sorted values."""
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceLimits:
    """Limits of the divergence guard.

    jump_z: a loss is a jump if it is at least this many robust standard deviations above the median of the recent
    losses; 0: no loss is a jump.
    window: number of recent losses to compare with; until there are that many, no loss is a jump.
    max_skipped_in_row: largest allowed number of consecutive steps whose loss jumps or is not finite.
    max_roll_backs: largest allowed number of roll-backs in the whole run.
    lr_factor: factor by which each roll-back multiplies the learning rate.
    """

    jump_z: float = 0.0
    window: int = 100
    max_skipped_in_row: int = 20
    max_roll_backs: int = 3
    lr_factor: float = 0.5


@final
class Divergence:
    """State of the divergence guard: the same on every rank, and saved with the run's state.

    lr_factor: factor on the learning rate, which each roll-back lowers.
    num_roll_backs: number of roll-backs so far.
    skipped_in_row: number of steps that were not accepted since the last applied step or roll-back.
    last_applied: newest step that changed the parameters.
    rolled_back_to: step of the checkpoint of the newest roll-back; None before the first roll-back.
    """

    def __init__(self, limits: DivergenceLimits) -> None:
        self._limits = limits
        self.lr_factor = 1.0
        self.num_roll_backs = 0
        self.skipped_in_row = 0
        self.last_applied = 0
        self.rolled_back_to: int | None = None
        self._keep_losses([])

    def why_not(self, *, loss: float, grad_norm: float) -> str | None:
        """Returns why a step must not be applied; None if the step may be applied.

        The result is None for gradients that are not finite: the updater itself skips such steps and adapts the
        loss scale.
        """
        if not math.isfinite(grad_norm):
            return None
        if not math.isfinite(loss):
            return f"loss {loss}"
        if self._limits.jump_z == 0 or len(self._losses) < self._limits.window:
            return None
        if cannot_jump(loss, self._sorted, limit=self._limits.jump_z):
            return None
        jump = robust_z(loss, self._losses)
        if jump < self._limits.jump_z:
            return None
        return (
            f"loss {loss:.4g}, {jump:.0f} robust standard deviations above the median of the last {len(self._losses)} "
            f"steps ({statistics.median(self._losses):.4g})"
        )

    def after_step(self, step: int, *, loss: float, applied: bool, why_not: str | None) -> None:
        """Records the outcome of `step`. Raises DivergedError after too many consecutive dropped steps.

        why_not: reason why this step was not accepted; None if the step was accepted.
        """
        if applied:
            self.skipped_in_row = 0
            self.last_applied = step
            if self._limits.jump_z > 0:
                if len(self._losses) == self._limits.window:
                    del self._sorted[bisect_left(self._sorted, self._losses[0])]
                self._losses.append(loss)
                insort(self._sorted, loss)
        elif why_not is not None:
            self.skipped_in_row += 1
            if self.skipped_in_row > self._limits.max_skipped_in_row:
                reason = f"{self.skipped_in_row} steps in a row had a loss that is not finite or jumped ({why_not})"
                raise DivergedError(
                    f"{reason}: the run has diverged. Lower optimizer.lr, raise optimizer.warmup_steps, set "
                    "optimizer.clip_norm, or resume from an older checkpoint; if the loss may jump, raise "
                    "guards.loss_jump_z",
                    agreed=True,
                    reason=reason,
                )

    @property
    def may_roll_back(self) -> bool:
        return self.num_roll_backs < self._limits.max_roll_backs

    def why_no_roll_back(self) -> str:
        """Returns why the run is not rolled back to an older checkpoint, as text for the message with which it ends."""
        if self._limits.max_roll_backs == 0:
            return "guards.max_roll_backs = 0"
        if not self.may_roll_back:
            times = f"{self.num_roll_backs} time{'s' if self.num_roll_backs > 1 else ''}"
            return f"rolled back {times} already (guards.max_roll_backs)"
        return "there is no checkpoint from before to roll back to"

    def choose(self, saved_steps: Sequence[int]) -> int | None:
        """Returns the step of the checkpoint to roll back to; None if no checkpoint is from before the divergence.

        The last applied step may have spoiled the parameters, so only checkpoints of earlier steps are considered.
        If the last roll-back already went to the newest of these checkpoints, the next older checkpoint is chosen, if
        any.
        """
        before = sorted(step for step in saved_steps if step < self.last_applied)
        if not before:
            return None
        if before[-1] == self.rolled_back_to and len(before) > 1:
            return before[-2]
        return before[-1]

    def rolled_back(self, saved: Mapping[str, Any], *, step: int) -> None:
        """Continues after a roll-back, with a lower learning rate.

        saved: guard state in the checkpoint that was restored.
        step: step of the restored checkpoint.
        """
        lr_factor, num_roll_backs = self.lr_factor * self._limits.lr_factor, self.num_roll_backs + 1
        self.load_state(saved)
        self.lr_factor, self.num_roll_backs, self.rolled_back_to = lr_factor, num_roll_backs, step
        self.skipped_in_row = 0

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint must hold, as values for JSON."""
        return {
            "lr_factor": self.lr_factor,
            "num_roll_backs": self.num_roll_backs,
            "skipped_in_row": self.skipped_in_row,
            "last_applied": self.last_applied,
            "rolled_back_to": self.rolled_back_to,
            "losses": list(self._losses),
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restores the guard's state from `saved`, a result of `state`.

        An empty `saved`, from a checkpoint without such a state, gives the state of a new run.
        """
        self.lr_factor = float(saved.get("lr_factor", 1.0))
        self.num_roll_backs = int(saved.get("num_roll_backs", 0))
        self.skipped_in_row = int(saved.get("skipped_in_row", 0))
        self.last_applied = int(saved.get("last_applied", 0))
        self.rolled_back_to = saved.get("rolled_back_to")
        self._keep_losses(saved.get("losses", []))

    def _keep_losses(self, losses: Sequence[float]) -> None:
        self._losses = deque(losses, maxlen=self._limits.window)
        self._sorted = sorted(self._losses)
