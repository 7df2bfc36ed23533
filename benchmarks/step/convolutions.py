"""A small residual network with batch normalisation on digits: 60 parameter tensors, most of them small."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hpctrain.train import Fields


class Block(nn.Module):
    """Adds a normalised convolution of its input to it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.normalisation = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.normalisation(self.convolution(x)))


class Convolutions:
    """The task of classifying `image`, shape (n, 1, 8, 8), values 0 to 16, into `label`, shape (n,), values 0 to 9."""

    def build_model(self) -> nn.Module:
        channels = 16
        first = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        blocks = [Block(channels) for _ in range(17)]
        last = [
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * channels, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        ]
        return nn.Sequential(first, *blocks, *last)

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        return functional.cross_entropy(self._logits(model, fields), fields["label"].long())

    def metrics(self, model: nn.Module, fields: Fields) -> dict[str, float]:
        logits = self._logits(model, fields)
        correct = (logits.argmax(dim=1) == fields["label"]).double().mean()
        return {"loss": float(self.loss(model, fields).detach()), "accuracy": float(correct)}

    def _logits(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        return model(fields["image"].float() / 16)
