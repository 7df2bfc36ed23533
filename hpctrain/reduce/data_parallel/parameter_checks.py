"""Checks that the optimizer and the model still have the parameters for which an updater was created."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.contract.step_end import check_clip_norm


class GradientKind(NamedTuple):
    """The properties for which the memory of a parameter's gradient was planned."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, parameter: torch.Tensor) -> GradientKind:
        return cls(parameter.shape, parameter.dtype, parameter.device)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}"


def trainable(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Returns the optimizer's parameters that need a gradient, in the order of the optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def check_updater_options(
    parameters: Sequence[torch.nn.Parameter], *, clip_norm: float | None, max_in_flight: int = 1
) -> None:
    """Raises UsageError for options that an updater cannot work with.

    parameters: the optimizer's parameters that need a gradient.
    """
    check_clip_norm(clip_norm)
    if max_in_flight < 1:
        raise UsageError(f"max_in_flight is {max_in_flight}: give at least 1")
    if not parameters:
        raise UsageError("the optimizer holds no parameter that needs a gradient: nothing to train")


def check_open(*, closed: bool) -> None:
    """Raises UsageError if the updater is closed."""
    if closed:
        raise UsageError("this updater is closed and no longer sums gradients over the ranks: make a new one")


class ParameterChecks:
    """Checks whether an updater's parameters have changed since the updater was created.

    optimizer: the optimizer whose parameter groups are checked.
    parameters: the parameters that need a gradient.
    model: the model that computes with the parameters, if known. Parameters that are not in the model are only looked
    for in the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        *,
        model: torch.nn.Module | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._ids = list(map(id, parameters))
        self._kinds = [GradientKind.of(parameter) for parameter in parameters]
        self._model = model
        trained = set(map(id, parameters))
        modules = model.named_modules() if model is not None else ()
        self._places = [
            (f"{prefix}.{name}" if prefix else name, module._parameters, name, parameter)
            for prefix, module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in trained
        ]

    def check(self) -> None:
        """Raises UsageError if parameters have changed since the updater was created.

        Parameters have changed if the optimizer has other trainable parameters, if a parameter of the model was
        replaced by another tensor, or if a parameter has another shape, dtype or device.
        """
        now = trainable(self._optimizer)
        if list(map(id, now)) != self._ids:
            raise UsageError(
                f"the optimizer has {len(now)} trainable parameters now, {len(self._parameters)} when the updater was "
                "made: new ones would not be reduced and the ranks would drift apart. Close this updater and make "
                "a new one after freezing, unfreezing or adding parameters"
            )
        self.check_kinds()
        for path, of_module, name, parameter in self._places:
            is_there = name in of_module and of_module[name] is parameter  # scripted modules' have no `get`
            if not is_there and not self._is_elsewhere(parameter):
                raise UsageError(
                    f"the model's parameter {path} was replaced by another one since the updater was made, as "
                    "load_state_dict(assign=True) and moves between kinds of devices do: the optimizer still updates "
                    "the old one. Load or move the model before the optimizer is made, or close this updater and make "
                    "a new optimizer and updater"
                )

    def check_kinds(self) -> None:
        """Raises UsageError if a parameter has another shape, dtype or device than when the updater was created."""
        for number, (parameter, kind) in enumerate(zip(self._parameters, self._kinds, strict=True)):
            if (
                parameter.dtype is not kind.dtype
                or parameter.shape != kind.shape
                or parameter.device != kind.device
            ):
                raise UsageError(
                    f"parameter {number} of the optimizer was {kind} when the updater was made and is "
                    f"{GradientKind.of(parameter)} now: convert or move the model (double(), half(), to()) before "
                    "session.distributed_optimizer, or close this updater and make a new optimizer and updater"
                )

    def _is_elsewhere(self, parameter: torch.nn.Parameter) -> bool:
        """Returns True if the model has the parameter in any module; parametrizations move parameters to others."""
        assert self._model is not None
        return any(found is parameter for found in self._model.parameters())
