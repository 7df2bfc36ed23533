"""A model of several blocks that is measured and planned, and its tasks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hpctrain.data import Batch
from hpctrain.distributed import Recomputation, checkpoint_activations
from hpctrain.train import TaskRunner
from hpctrain.train.task.task import Fields

WIDTH, MB = 64, 10**6


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Task:
    """Rows of WIDTH numbers. on_cpu: the model cannot be built without values. normalised: with batch normalisation."""

    def __init__(
        self, *, layers: int = 6, on_cpu: bool = False, normalised: bool = False, fails: bool = False
    ) -> None:
        self.layers, self.on_cpu, self.normalised, self.fails = layers, on_cpu, normalised, fails

    def build_model(self) -> nn.Module:
        blocks = [Block() for _ in range(self.layers)]
        if self.on_cpu and float(blocks[0].up.weight.sum()) == 0.0:
            raise AssertionError
        if self.normalised:
            for block in blocks:
                block.norm = nn.BatchNorm1d(WIDTH)
        return nn.Sequential(*blocks, nn.Linear(WIDTH, 2))

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        if self.fails:
            raise KeyError("needs a GPU")
        return functional.cross_entropy(model(fields["x"]), fields["label"])

    def metrics(self, model: nn.Module, fields: Fields) -> dict[str, float]:
        return {}


def batch_of(samples: int) -> Batch:
    fields = {"x": torch.randn(samples, WIDTH), "label": torch.zeros(samples, dtype=torch.int64)}
    return Batch(fields=fields, epoch=0, start=0, num_samples=samples, global_samples=samples)


def runner_of(task: Task, saving: Recomputation = "none") -> TaskRunner:
    model = task.build_model()
    if saving != "none":
        checkpoint_activations(model, saving)
    return TaskRunner(task, model, device=torch.device("cpu"))


class Splittable(Task):
    """Its layers can be split, and put into stages."""

    def tensor_plan(self) -> dict[str, str]:
        return {"*.up": "column", "*.down": "row"}

    def pipeline_layers(self, model: nn.Sequential) -> list[nn.Module]:
        return list(model)
