"""The learning rate as a function of the step alone, so that no state of the schedule needs to be saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

# Key of a parameter group whose learning rate is this multiple of the schedule's.
LR_SCALE = "lr_scale"


class Decay(Enum):
    """How the learning rate falls after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    STEP = "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate schedule: linear warm-up, then constant, cosine or step decay, or a user's function.

    Sources: of scaling and warm-up, Goyal et al. 2017, arXiv:1706.02677; of cosine decay, Loshchilov and Hutter 2017,
    arXiv:1608.03983.

    decay: the kind of decay, or a function of two numbers: the steps since the end of the warm-up, and all steps after
    the warm-up. The function returns the factor by which `peak_lr` is multiplied.
    """

    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    decay: Decay | Callable[[int, int], float] = Decay.CONSTANT
    final_fraction: float = 0.0
    step_every: int = 1
    step_factor: float = 1.0

    def lr(self, step: int) -> float:
        """Returns the learning rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.decay is Decay.CONSTANT:
            return self.peak_lr
        after = step - self.warmup_steps
        if not isinstance(self.decay, Decay):
            return self.peak_lr * float(self.decay(after, self.total_steps - self.warmup_steps))
        if self.decay is Decay.STEP:
            return self.peak_lr * self.step_factor ** (after // self.step_every)
        progress = min(1.0, after / max(1, self.total_steps - self.warmup_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.peak_lr * (self.final_fraction + (1 - self.final_fraction) * cosine)


def scaled_lr(lr: float, *, scaling: str, global_batch: int, reference_batch: int | None) -> float:
    """Returns the learning rate for `global_batch` samples per step, from `lr`, which was chosen for `reference_batch`.

    scaling: `none`, `linear` or `sqrt`.
    """
    if scaling == "none" or reference_batch is None:
        return lr
    ratio = global_batch / reference_batch
    return lr * (ratio if scaling == "linear" else math.sqrt(ratio))


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Sets the learning rate of a parameter group.

    If the learning rate is a tensor, the tensor is changed in place, since compiled steps refer to this tensor.
    """
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
