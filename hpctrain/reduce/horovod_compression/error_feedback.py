"""Residuals of this rank's compression by parameter, in units of the gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch

from hpctrain.errors import UsageError


@final
class GradientOwners:
    """Finds a parameter's name by its gradient.

    Horovod compresses `p.grad` itself, one parameter at a time. The order differs between ranks if parameters are
    unused, and the gradients are different tensors in each step. So a parameter is identified by `p.grad is tensor`.
    The successor in the previous step is tried first: searching all parameters each time would take quadratic time.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._parameters = dict(named_parameters)
        if not self._parameters:
            raise UsageError(
                "the compression has no named parameters: pass model.named_parameters(). A generator that "
                "was used before is empty"
            )
        self._next_after: dict[str, str] = {}
        self._last = ""

    def names(self) -> list[str]:
        return list(self._parameters)

    def parameter(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def owner_of(self, gradient: torch.Tensor) -> str:
        """Returns the name of the parameter. Raises UsageError if `gradient` is not the gradient of any."""
        guess = self._next_after.get(self._last)
        if guess is None or self._parameters[guess].grad is not gradient:
            guess = next((n for n, p in self._parameters.items() if p.grad is gradient), None)
            if guess is None:
                raise UsageError(
                    f"Horovod passed a tensor of shape {tuple(gradient.shape)} that is the gradient of none of the "
                    f"compression's {len(self._parameters)} named parameters. Pass all parameters of the model to the "
                    "compression; op=hvd.Adasum and sparse_as_dense=True cannot be used with it"
                )
            self._next_after[self._last] = guess
        self._last = guess
        return guess


@final
class HvdResiduals:
    """Error feedback by parameter name; flat tensors, float32 or float64."""

    def __init__(self, owners: GradientOwners, *, num_ranks: int) -> None:
        self._owners = owners
        self._num_ranks = num_ranks
        self._kept: dict[str, torch.Tensor] = {}

    def added_to(self, gradient: torch.Tensor, *, name: str) -> torch.Tensor:
        """Returns gradient plus residual as a new tensor of shape (n,), float32 or float64."""
        flat = gradient.detach().reshape(-1).to(torch.promote_types(gradient.dtype, torch.float32))
        kept = self._kept.get(name)
        if kept is None:
            return flat.clone()
        return flat + kept.to(flat.device)

    def keep(self, residual: torch.Tensor, *, name: str) -> None:
        self._kept[name] = residual

    def state_dict(self) -> dict[str, Any]:
        return {"num_ranks": self._num_ranks, "residuals": {n: t.clone() for n, t in self._kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`. Raises UsageError, without changes, if names or sizes are not this model's.

        Warns and starts at zero if the number of ranks differs.
        """
        saved: Mapping[str, torch.Tensor] = state.get("residuals", {})
        known = set(self._owners.names())
        for name, tensor in saved.items():
            if name not in known:
                raise UsageError(f"the saved compression has a parameter {name!r}, which this model lacks")
            numel = self._owners.parameter(name).numel()
            if tensor.numel() != numel:
                raise UsageError(
                    f"the saved residual of {name!r} has {tensor.numel()} values, the parameter {numel}: it was "
                    "saved from another model"
                )
        if saved and state["num_ranks"] != self._num_ranks:
            warnings.warn(
                f"the saved residuals of {state['num_ranks']} ranks cannot be used: there are {self._num_ranks} now, "
                "and they start at zero: about one step's rounding errors are lost",
                stacklevel=3,
            )
            saved = {}
        self._kept = {n: t.clone().reshape(-1) for n, t in saved.items()}


def largest_magnitude(values: torch.Tensor) -> float:
    """Returns the largest absolute value; NaN if any is not finite, 0 if empty. Faster than `isfinite().all()`."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return max(-low, high) if math.isfinite(low + high) else math.nan
