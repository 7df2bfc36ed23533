"""Whole runs in this process, of a task whose loss can be spoilt and whose memory can be short; for the tests here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.resilience import StopRequest
from tests.sessions import carried_out

STEPS = 40
PETABYTE = 1 << 50
Spoil = Callable[[torch.Tensor, int], torch.Tensor]


def unspoilt(loss: torch.Tensor, step: int) -> torch.Tensor:
    return loss


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient + torch.empty(PETABYTE)[0]


class Task:
    """A small classifier of digits.

    spoil: changes the loss, by the number of the call. most_rows: with more samples at a time memory is short, where a
    real allocation fails. in_backward: it fails there, after the last layer's gradients are on their way.
    """

    def __init__(self, *, spoil: Spoil = unspoilt, most_rows: int = 10**9, in_backward: bool = False) -> None:
        self.stop = StopRequest()
        self.spoil = spoil
        self.most_rows = most_rows
        self.in_backward = in_backward
        self.calls = 0
        self.rows: list[int] = []
        self.model: torch.nn.Module = torch.nn.Identity()

    def build_model(self) -> torch.nn.Module:
        layers = [torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)]
        for number, layer in enumerate(layers):  # ranks that are threads share one random generator
            draw = torch.Generator().manual_seed(number)
            for parameter in layer.parameters():
                torch.nn.init.normal_(parameter, std=0.1, generator=draw)
        self.model = torch.nn.Sequential(torch.nn.Flatten(), *layers)
        return self.model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        rows = len(fields["label"])
        short = rows > self.most_rows
        flatten, first, tanh, last = model.children()
        hidden = tanh(first(flatten(fields["image"])))
        if short and self.in_backward:
            hidden = FailsInBackward.apply(hidden)
        logits = last(hidden)
        if short and not self.in_backward:
            torch.empty(PETABYTE)
        self.rows.append(rows)
        return self.spoil(functional.cross_entropy(logits, fields["label"]), self.calls)

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        return {}

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def run(
    where: Path, task: Task, *, world: World | None = None, name: str = "run", nodes: Sequence[str] | None = None,
    **sections: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": str(where / name), "steps": STEPS},
        "task": {"target": "tests:Task"},
        "data": {"train": str(where / "data"), "global_batch": 20},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "checkpoint": {"every_steps": 5},
        "reduction": {"bucket_mb": 0.001},
    }
    for section, values in sections.items():
        document[section] = {**document.get(section, {}), **values}
    return carried_out(document, task, world=world, nodes=nodes, stop=task.stop)
