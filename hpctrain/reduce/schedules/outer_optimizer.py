"""The outer optimizer of DiLoCo: Nesterov SGD on the newest average of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch

from hpctrain.reduce.contract.bucket_reducer import StateTensor

MOMENTUM = "outer_momentum/"


@final
class OuterOptimizer:
    """PyTorch's SGD with Nesterov momentum, whose parameters are `base` and whose gradient is minus the mean change.

    Every rank makes the same step with the same bits. No method is collective. Needs memory for one copy of the
    parameters (the momentum).
    """

    def __init__(self, base: Sequence[torch.Tensor], *, lr: float, momentum: float) -> None:
        self._base = base
        self._momentum = momentum
        self._sgd = torch.optim.SGD(list(base), lr=lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self, mean_changes: Sequence[torch.Tensor]) -> None:
        """Steps `base`. Changes the sign of `mean_changes`, which have the shapes of `base`."""
        for base, change in zip(self._base, mean_changes, strict=True):
            base.grad = change.neg_()
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    def state(self) -> list[StateTensor]:
        """Returns the momentum of each parameter; [] before the first step."""
        found = []
        for number, base in enumerate(self._base):
            momentum = self._sgd.state.get(base, {}).get("momentum_buffer")
            if momentum is not None:
                shape = tuple(momentum.shape)
                name = f"{MOMENTUM}{number}"
                found.append(
                    StateTensor(name=name, tensor=momentum, global_shape=shape, offset=(0,) * len(shape))
                )
        return found

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores `state`. A momentum that was not saved starts as in a new run."""
        self._sgd.state.clear()
        for number, base in enumerate(self._base):
            saved = tensors.get(f"{MOMENTUM}{number}")
            if saved is not None and self._momentum > 0:
                self._sgd.state[base]["momentum_buffer"] = torch.empty_like(base).copy_(saved)
