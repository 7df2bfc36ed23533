"""The learning rate as a pure function of the step: nothing to save, nothing to drift on resume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Decay(Enum):
    CONSTANT = "constant"
    COSINE = "cosine"
    STEP = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up to `peak_lr`, then constant, cosine or step decay.

    Source of scaling and warm-up: Goyal et al. 2017, arXiv:1706.02677. Of cosine decay: Loshchilov and
    Hutter 2017, arXiv:1608.03983.
    """

    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    decay: Decay = Decay.CONSTANT
    final_fraction: float = 0.0
    step_every: int = 1
    step_factor: float = 1.0

    def lr(self, step: int) -> float:
        """Learning rate of the optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.decay is Decay.CONSTANT:
            return self.peak_lr
        after = step - self.warmup_steps
        if self.decay is Decay.STEP:
            return self.peak_lr * self.step_factor ** (after // self.step_every)
        progress = min(1.0, after / max(1, self.total_steps - self.warmup_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.peak_lr * (self.final_fraction + (1 - self.final_fraction) * cosine)


def scaled_lr(lr: float, *, scaling: str, global_batch: int, reference_batch: int | None) -> float:
    """`lr`, chosen for `reference_batch`, carried over to `global_batch`: `none`, `linear` or `sqrt`."""
    if scaling == "none" or reference_batch is None:
        return lr
    ratio = global_batch / reference_batch
    return lr * (ratio if scaling == "linear" else math.sqrt(ratio))
