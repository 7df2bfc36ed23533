"""A task whose computing sleeps, so that ranks which share cores compute as if each had a node of its own."""

from __future__ import annotations

import time
from typing import Any

import torch

from hpctrain.train import Fields


class _Sleep(torch.autograd.Function):
    """Passes its input on, and sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class _Layer(torch.nn.Module):
    def __init__(self, size: int, seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((size,), 0.01))
        self.sample_s = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(x, self.sample_s * len(x))
        return slept + self.weight.mean()


class Proportional:
    """Layers that take a time proportional to the samples, twice as long in backward as in forward.

    sample_s: seconds for each sample. fixed_s: seconds of each step besides. size: parameters of each layer.
    """

    def __init__(self, *, sample_s: float, fixed_s: float = 0.0, size: int = 10_000, layers: int = 4) -> None:
        self._fixed_s = fixed_s
        self._layers = [(size, sample_s / layers / 3)] * layers

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(*(_Layer(size, seconds) for size, seconds in self._layers))

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        time.sleep(self._fixed_s)
        loss: torch.Tensor = model(fields["x"].requires_grad_()).square().mean()
        return loss

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"mean": float(fields["x"].mean())}
