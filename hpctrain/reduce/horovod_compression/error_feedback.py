"""What this rank's compression has kept back of each parameter's gradient, in units of the gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, final

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.horovod_compression.parameter_lookup import GradientOwners


@final
class HvdResiduals:
    """Error feedback by parameter name; flat tensors, float32 or float64."""

    def __init__(self, owners: GradientOwners, *, num_ranks: int) -> None:
        self._owners = owners
        self._num_ranks = num_ranks
        self._kept: dict[str, torch.Tensor] = {}

    def added_to(self, gradient: torch.Tensor, *, name: str) -> torch.Tensor:
        """A new flat tensor: the gradient and what was kept back."""
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
        """Raises UsageError, and changes nothing, when names or sizes are not this model's."""
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
                f"residuals of {state['num_ranks']} ranks belong to those ranks; there are {self._num_ranks} now, "
                "and they begin at zero: about one step's rounding errors are lost",
                stacklevel=3,
            )
            saved = {}
        self._kept = {n: t.clone().reshape(-1) for n, t in saved.items()}


def largest_magnitude(values: torch.Tensor) -> float:
    """NaN when a value is not finite; 0 of no values. One pass, where `isfinite().all()` is slow."""
    if values.numel() == 0:
        return 0.0
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return max(-low, high) if math.isfinite(low + high) else math.nan
