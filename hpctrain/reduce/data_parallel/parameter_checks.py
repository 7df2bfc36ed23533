"""Whether the parameters are still those that an updater was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.contract.clipping import check_clip_norm


class Kind(NamedTuple):
    """What the memory of a parameter's gradient was planned for."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Kind:
        return cls(parameter.shape, parameter.dtype, parameter.device)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}"


def trainable(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Returns the optimizer's parameters that need a gradient, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def check_options(
    parameters: Sequence[torch.nn.Parameter], *, clip_norm: float | None, max_in_flight: int = 1
) -> None:
    """Raises UsageError for values that an updater cannot work with. parameters: those that are trained."""
    check_clip_norm(clip_norm)
    if max_in_flight < 1:
        raise UsageError(f"max_in_flight is {max_in_flight}: give at least 1")
    if not parameters:
        raise UsageError("the optimizer holds no parameter that needs a gradient: nothing to train")


def check_open(*, closed: bool) -> None:
    """Raises UsageError for a closed updater."""
    if closed:
        raise UsageError("this updater is closed and no longer sums gradients over the ranks: make a new one")


def check_parameters(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raises UsageError unless the optimizer's trainable parameters are `parameters`, of which buckets are planned."""
    now = trainable(optimizer)
    if len(now) != len(parameters) or any(a is not b for a, b in zip(now, parameters, strict=True)):
        raise UsageError(
            f"the optimizer has {len(now)} trainable parameters now, {len(parameters)} when the updater was "
            "made: new ones would not be reduced and the ranks would drift apart. Close this updater and make "
            "a new one after freezing, unfreezing or adding parameters"
        )


def check_kinds(parameters: Sequence[torch.nn.Parameter], kinds: Sequence[Kind]) -> None:
    """Raises UsageError if a parameter has another shape, dtype or device than in `kinds`."""
    for number, (parameter, kind) in enumerate(zip(parameters, kinds, strict=True)):
        if (
            parameter.dtype is not kind.dtype
            or parameter.shape != kind.shape
            or parameter.device != kind.device
        ):
            raise UsageError(
                f"parameter {number} of the optimizer was {kind} when the updater was made and is {Kind.of(parameter)} "
                "now: convert or move the model (double(), half(), to()) before session.updater, or close this updater "
                "and make a new optimizer and updater"
            )
