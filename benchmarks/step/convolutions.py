"""A small residual network with batch normalisation on digits: 60 parameter tensors, most of them small."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hpctrain.tasks.digits import Digits


class Block(nn.Module):
    """Adds a normalised convolution of its input to it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.normalisation = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.normalisation(self.convolution(x)))


class Convolutions(Digits):
    """The task of `Digits` with this network."""

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
