"""Loss scale: the factor by which the loss is multiplied before backward. Pure functions of values.

Small gradients underflow in float16, and large gradients overflow. The factor keeps gradients in range: the factor is
halved after a step that overflowed, and doubled after a number of good steps (Micikevicius et al. 2018,
arXiv:1710.03740). All factors are powers of two, so scaling and unscaling lose no bits of a float32 gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpctrain.errors import DivergedError, UsageError
from hpctrain.reduce.wire_formats import find_wire

LARGEST = 2.0**24
SMALLEST = 2.0**-14


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Value and history of the loss scale. Immutable: each method returns a new object.

    Attributes:
        value: Factor by which the loss is multiplied.
        dynamic: True if the factor adapts to overflows; False if it never changes.
        growth_steps: Number of consecutive good steps after which the factor is doubled.
        good_steps: Good steps since the factor last changed or a step was skipped.
        skipped_in_row: Consecutive steps that were skipped up to now.
        skipped_total: Steps of the whole run that were skipped.
        max_skipped_in_row: Largest number of consecutive skipped steps that is allowed.
    """

    value: float = 1.0
    dynamic: bool = False
    growth_steps: int = 500
    good_steps: int = 0
    skipped_in_row: int = 0
    skipped_total: int = 0
    max_skipped_in_row: int = 20

    @classmethod
    def for_wire(cls, wire: str, *, max_skipped_in_row: int = 20) -> LossScale:
        """Returns the loss scale for a wire format: dynamic if the format (such as fp16) needs scaling, otherwise 1."""
        found = find_wire(wire)
        if found is None or found.loss_scale is None:
            return cls(max_skipped_in_row=max_skipped_in_row)
        return cls(value=found.loss_scale, dynamic=True, max_skipped_in_row=max_skipped_in_row)

    def scaled(self, loss: torch.Tensor, *, weight: float) -> torch.Tensor:
        """Returns the loss multiplied by `weight` and by this loss scale.

        Args:
            loss: A tensor with one element.
            weight: The micro-batch's share of the global batch.

        Raises:
            UsageError: The loss has more than one element, or none.
        """
        if loss.numel() != 1:
            raise UsageError(
                f"the loss has shape {tuple(loss.shape)}: give a single number, such as its mean"
            )
        # `backward` with a gradient as its argument would import sympy: 0.3 s of every start.
        return loss * (weight * self.value)

    def after_good_step(self) -> LossScale:
        """Returns the loss scale to use after a step that was applied."""
        if not self.dynamic and not self.skipped_in_row:
            return self  # its good steps never count
        good = self.good_steps + 1
        if self.dynamic and good >= self.growth_steps:
            return replace(self, value=min(self.value * 2, LARGEST), good_steps=0, skipped_in_row=0)
        return replace(self, good_steps=good, skipped_in_row=0)

    def after_overflow(self) -> LossScale:
        """Returns the loss scale to use after a step that was skipped because gradients were not finite."""
        value = max(self.value / 2, SMALLEST) if self.dynamic else self.value
        return replace(
            self,
            value=value,
            good_steps=0,
            skipped_in_row=self.skipped_in_row + 1,
            skipped_total=self.skipped_total + 1,
        )

    def continued(self, saved: Mapping[str, Any]) -> LossScale:
        """Returns this loss scale with the value and history from a checkpoint.

        Args:
            saved: The saved loss scale, as a dict of its fields. Its `value` and `good_steps` are used only if both
                loss scales are dynamic. The result has `dynamic`, `growth_steps` and `max_skipped_in_row` of this
                object.
        """
        now = self
        if self.dynamic and saved["dynamic"]:
            now = replace(now, value=saved["value"], good_steps=saved["good_steps"])
        return replace(now, skipped_in_row=saved["skipped_in_row"], skipped_total=saved["skipped_total"])

    def check(self, *, used_value: float) -> None:
        """Raises an error if too many consecutive steps were skipped.

        Args:
            used_value: Loss scale that was used in the last step, for the message.

        Raises:
            DivergedError: On all ranks. More than `max_skipped_in_row` consecutive steps were skipped.
        """
        if self.skipped_in_row > self.max_skipped_in_row:
            reason = (
                f"{self.skipped_in_row} steps in a row had gradients that are not finite "
                f"(loss scale {used_value:g})"
            )
            raise DivergedError(
                f"{reason}: the run has diverged. Lower optimizer.lr, raise optimizer.warmup_steps, set "
                "optimizer.clip_norm, or resume from an older checkpoint",
                agreed=True,
                reason=reason,
            )
