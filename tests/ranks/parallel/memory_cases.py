"""What one rank does in the test of planned memory: it trains, and says how much its memory has grown."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.growth.resident import resident_bytes
from hpctrain.comm import World
from hpctrain.resilience import StopRequest, keep_freed_memory
from hpctrain.run import parse_recipe
from hpctrain.run.training import Resume, carry_out
from hpctrain.train.task.task import Fields
from tests.sessions import session_over

FEATURES = 16
STEPS = 4  # the memory is read when the fourth begins: after three
# About 20 million parameters.
LAYERS, WIDTH = 9, 512


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Blocks:
    """Residual blocks. before, after: resident bytes before the model is built, and after three steps."""

    def __init__(self, *, layers: int = LAYERS, width: int = WIDTH) -> None:
        self.layers, self.width = layers, width
        self.before = self.after = 0
        self._steps = 0

    def build_model(self) -> torch.nn.Module:
        gc.collect()
        self.before = resident_bytes()
        blocks = torch.nn.Sequential(*(Block(self.width) for _ in range(self.layers)))
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, self.width), blocks, torch.nn.Linear(self.width, 2)
        )

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self._steps += 1
        if self._steps == STEPS:
            self.after = resident_bytes()
        return functional.cross_entropy(model(fields["x"]), fields["label"])

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {}


def document(directory: str, name: str, parallel: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        "run": {"directory": f"{directory}/{name}", "steps": STEPS, "device": "cpu"},
        "task": {"target": f"{__name__}:Blocks"},
        "data": {"train": f"{directory}/data", "global_batch": 256, "prefetch_mb": 0.1},
        "parallel": parallel,
    }


def growth(world: World, directory: str, name: str, parallel: dict[str, str]) -> int:
    """Returns by how many bytes this rank's memory has grown. A run of a small model loads what is loaded once."""
    keep_freed_memory()
    task = Blocks()
    for number, trained in enumerate((Blocks(layers=2, width=8), task)):
        carry_out(
            parse_recipe(document(directory, f"{name}-{number}", parallel)), trained,
            session=session_over(world, nodes=["a", "b"]), resume=Resume(), stop=StopRequest(),
        )  # fmt: skip
    assert Path(directory, f"{name}-1", "summary.json").exists()
    return task.after - task.before
