"""Handwritten digits: an image classifier on the dataset that comes with scikit-learn (1,797 images, 8 x 8)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hpctrain.train import Fields


class Digits:
    """The task of classifying `image`, shape (n, 1, 8, 8), values 0 to 16, into `label`, shape (n,), values 0 to 9."""

    def __init__(self, *, width: int = 32, dropout: float = 0.0) -> None:
        self._width = width
        self._dropout = dropout

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self._width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self._width, 2 * self._width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self._dropout),
            nn.Linear(2 * self._width * 16, 4 * self._width),
            nn.ReLU(),
            nn.Linear(4 * self._width, 10),
        )

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        return functional.cross_entropy(self._logits(model, fields), fields["label"].long())

    def metrics(self, model: nn.Module, fields: Fields) -> dict[str, float]:
        logits = self._logits(model, fields)
        correct = (logits.argmax(dim=1) == fields["label"]).double().mean()
        return {"loss": float(self.loss(model, fields).detach()), "accuracy": float(correct)}

    def _logits(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        return model(fields["image"].to(dtype) / 16)
