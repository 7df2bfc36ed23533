"""A task of your own: a class with a model, a loss and metrics. It knows nothing of ranks."""

import torch
from torch.nn import functional


class Spirals:
    """Two interleaved spirals: `point` (n, 2) into `side` (n,), 0 or 1."""

    def __init__(self, *, width: int = 64) -> None:
        self.width = width

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(2, self.width),
            torch.nn.Tanh(),
            torch.nn.Linear(self.width, self.width),
            torch.nn.Tanh(),
            torch.nn.Linear(self.width, 2),
        )

    def loss(self, model: torch.nn.Module, fields) -> torch.Tensor:
        return functional.cross_entropy(model(fields["point"]), fields["side"])

    def metrics(self, model: torch.nn.Module, fields) -> dict[str, float]:
        right = model(fields["point"]).argmax(dim=1) == fields["side"]
        return {"accuracy": float(right.double().mean())}
