"""What one rank does in the tests of split models: the same training in several layouts, continued in others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.resilience import StopRequest
from hpctrain.run import parse_recipe
from hpctrain.run.training import Resume, carry_out
from hpctrain.telemetry import read_records
from hpctrain.train.task.task import Fields, Task
from tests.sessions import session_over

STEPS, LATER = 20, 23
NODES = {1: ["a"], 2: ["a", "b"], 3: ["a", "a", "b"], 4: ["a", "a", "b", "b"]}
WORLD = {"shard": "parameters"}
NODE = {"shard": "parameters", "shard_within": "node"}
SAVING = {"activation_checkpointing": "blocks"}
# The layouts that are trained on each number of ranks. Three ranks are on unequal nodes.
LAYOUTS: dict[int, dict[str, dict[str, str]]] = {
    1: {"none": {}, "world": WORLD, "checkpointing": SAVING},
    2: {"world": WORLD, "node": NODE},
    3: {"world": WORLD | SAVING, "none": {}},
    4: {"world": WORLD, "node": NODE | SAVING},
}
# Runs that are continued: the ranks and layout that have saved, and the layout of those that load.
CONTINUED: dict[int, list[tuple[int, str, dict[str, str]]]] = {
    1: [],
    2: [(1, "none", WORLD), (1, "world", {})],
    4: [(2, "world", NODE), (2, "node", {})],
    3: [(4, "node", WORLD), (4, "world", {})],
}


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


def train(
    world: World,
    directory: Path,
    name: str,
    layout: Mapping[str, Any],
    *,
    steps: int = STEPS,
    task: Task | None = None,
    nodes: Sequence[str] | None = None,
    precision: str = "fp64",
    **sections: dict[str, Any],
) -> dict[str, Any]:
    """61 samples in batches of 12: the last of an epoch has one, and most ranks have none of it."""
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": str(directory / name), "steps": steps, "seed": 3, "precision": precision},
        "task": {"target": "tests:Layers"},
        "data": {
            "train": str(directory / "data"), "held_out": str(directory / "data"), "global_batch": 12,
            "micro_batches": 2, "evaluation_batch": 12,
        },
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.3, "ema": 0.6},
        "parallel": dict(layout),
        **sections,
    }  # fmt: skip
    summary = carry_out(
        parse_recipe(document), task or Layers(), session=session_over(world, nodes=nodes or NODES[world.num_ranks]),
        resume=Resume(), stop=StopRequest(),
    )  # fmt: skip
    records = list(read_records(directory / name / "metrics" / f"rank-{world.rank:05}.jsonl"))
    evaluations = [r["quality"]["nats"] for r in records if r["kind"] == "evaluation"]
    return {
        "steps": [
            [r["loss"], r["grad_norm"], r["applied"]]
            for r in records
            if r["kind"] == "step" and r["step"] > steps - (steps if steps == STEPS else LATER - STEPS)
        ],
        "evaluation": evaluations[-1],
        "evaluation of the average": [
            r["quality"].get("ema_nats") for r in records if r["kind"] == "evaluation"
        ][-1],
        "evaluations": evaluations,
        "status": summary["status"],
    }


def everything(world: World, directory: str) -> dict[str, Any]:
    """All cases of one launch."""
    where, size = Path(directory), world.num_ranks
    found = {name: train(world, where, f"{size}-{name}", layout) for name, layout in LAYOUTS[size].items()}
    found["tempered"] = train(world, where, f"{size}-tempered", WORLD if size > 1 else {}, task=Tempered())
    if size == 1:
        found["later"] = train(world, where, "1-later", {}, steps=LATER)
    for ranks, name, layout in CONTINUED[size]:
        found[f"{ranks}-{name} continued"] = train(world, where, f"{ranks}-{name}", layout, steps=LATER)
    if size == 2:
        for name, layout in (("fp16 none", {}), ("fp16 world", WORLD)):
            found[name] = train(
                world, where, name, layout, task=Layers(overflow=True), precision="fp16",
                guards={"loss_jump_z": 0.0},
            )  # fmt: skip
        for name, layout in (("dropout", WORLD), ("dropout again", WORLD | SAVING)):
            found[name] = train(world, where, name, layout, task=Layers(dropout=0.4))
    return found
