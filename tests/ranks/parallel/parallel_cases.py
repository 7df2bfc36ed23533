"""A small classifier of rows, whole and with sharded parameters, continued in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.train.task.task import Fields
from tests.ranks.parallel.layouts import Family, Found, Launch, Layout, train

WORLD = {"shard": "parameters"}
NODE = {"shard": "parameters", "shard_within": "node"}
SAVING = {"activation_checkpointing": "blocks"}


class Block(torch.nn.Module):
    """A residual block; 5 rows of its second bias are over 2, 3 and 4 ranks unequal parts, and some are empty."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(5)
        self.up, self.down = torch.nn.Linear(5, 7), torch.nn.Linear(7, 5)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))


class Layers:
    """Classifies rows of three numbers. overflow: the loss of sample 7 is so large that its gradients overflow.

    As any task may, it counts on at least one sample.
    """

    def __init__(self, *, dropout: float = 0.0, overflow: bool = False) -> None:
        self.dropout, self.overflow = dropout, overflow

    def build_model(self) -> torch.nn.Module:
        blocks = torch.nn.Sequential(*(Block(self.dropout) for _ in range(3)))
        return torch.nn.Sequential(torch.nn.Linear(3, 5), blocks, torch.nn.Linear(5, 2))

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        assert len(fields["label"]) > 0
        loss = functional.cross_entropy(model(fields["x"]), fields["label"])
        return loss * 1e36 if self.overflow and 7 in fields["id"] else loss

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"nats": float(functional.cross_entropy(model(fields["x"]), fields["label"]))}


class WithTemperature(torch.nn.Module):
    """Layers, and a parameter that multiplies the mean loss."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers, self.temperature = layers, torch.nn.Parameter(torch.zeros(1))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(values), self.temperature * 1


class Tempered(Layers):
    """Learns a temperature of its loss: of no samples the mean, and with it that parameter's gradient, is NaN."""

    def build_model(self) -> torch.nn.Module:
        return WithTemperature(super().build_model())

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        logits, temperature = model(fields["x"])
        mean = functional.cross_entropy(logits, fields["label"])
        loss: torch.Tensor = (mean * torch.exp(-temperature) + temperature).sum()
        return loss

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"nats": float(functional.cross_entropy(model(fields["x"])[0], fields["label"]))}


def train_layers(world: World, where: Path, name: str, layout: Layout, **more: Any) -> Found:
    return train(world, where, name, layout, **{"task": Layers(), **more})


def tempered(world: World, where: Path) -> Found:
    layout = WORLD if world.num_ranks > 1 else {}
    return {"tempered": train(world, where, f"{world.num_ranks}-tempered", layout, task=Tempered())}


def tempered_and_dropped(world: World, where: Path) -> Found:
    dropped = {
        name: train(world, where, name, layout, task=Layers(dropout=0.4))
        for name, layout in (("dropout", WORLD), ("dropout again", WORLD | SAVING))
    }
    return tempered(world, where) | dropped


# Three ranks are on unequal nodes.
FAMILY = Family(
    cases=__name__,
    train=train_layers,
    overflows={"task": Layers(overflow=True)},
    reference="1-checkpointing",
    launches=[
        Launch(ranks=1, layouts={"none": {}, "world": WORLD, "checkpointing": SAVING}, more=tempered),
        Launch(
            ranks=2,
            layouts={"world": WORLD, "node": NODE},
            continued={"1-none": WORLD, "1-world": {}},
            overflowing={"none": {}, "world": WORLD},
            more=tempered_and_dropped,
        ),
        Launch(
            ranks=4,
            layouts={"world": WORLD, "node": NODE | SAVING},
            continued={"2-world": NODE, "2-node": {}},
            more=tempered,
        ),
        Launch(
            ranks=3,
            layouts={"world": WORLD | SAVING, "none": {}},
            continued={"4-node": WORLD, "4-world": {}},
            more=tempered,
        ),
    ],
)
