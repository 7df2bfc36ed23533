"""A task that several tests train on ranks that are threads."""

from __future__ import annotations

import torch


class TinyTask:
    """The field `x` has four numbers."""

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Linear(4, 2)
        for parameter in model.parameters():  # ranks that are threads share one random generator
            torch.nn.init.constant_(parameter, 0.01)
        return model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(fields["x"]).square().mean()

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"accuracy": 0.5}
