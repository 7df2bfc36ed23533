"""What one rank does in the tests of sharded optimizers and gradients: trainings in several layouts, some continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World
from tests.fsdp2 import fsdp2_refusal
from tests.ranks.parallel.layouts import LATER, STEPS, train
from tests.ranks.parallel.parallel_cases import NODE, WORLD, Layers
from tests.ranks.parallel.sharded_reduction_cases import Overflowing

OPTIMIZER, GRADIENTS = {"shard": "optimizer"}, {"shard": "gradients"}
# Small buckets, so that there are several of each model, and parameters that are larger than one.
REDUCTION = {"reduction": {"algorithm": "hierarchical", "bucket_mb": 0.004}}
UNCLIPPED = {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}}
# The parameters of a step are gathered during the next one, or before what comes between.
BETWEEN_STEPS = {"telemetry": {"evaluate_every_steps": 3}, "checkpoint": {"every_steps": 7}}
INT8 = {"reduction": {"algorithm": "direct", "bucket_mb": 0.004, "wire": "int8"}}
# Runs that are continued: the ranks and layout that have saved, and the layout of those that load.
CONTINUED: dict[int, list[tuple[int, str, dict[str, str]]]] = {
    1: [],
    2: [(1, "none", OPTIMIZER), (1, "again", GRADIENTS)],
    4: [(2, "optimizer", GRADIENTS), (2, "gradients", {}), (2, "world", OPTIMIZER), (2, "none", NODE)],
    3: [(4, "optimizer", WORLD), (4, "gradients", OPTIMIZER), (4, "world", GRADIENTS)],
}
INT8_CONTINUED: dict[int, list[tuple[int, str, dict[str, str]]]] = {
    1: [],
    2: [],
    4: [(2, "int8 none", GRADIENTS), (2, "int8 optimizer", {})],
    3: [(4, "int8 gradients", OPTIMIZER)],
}


class Block(torch.nn.Module):
    """A residual block whose layers are larger than a bucket, and are divided within rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(24)
        self.up, self.down = torch.nn.Linear(24, 50), torch.nn.Linear(50, 24)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden + found


class Picture(torch.nn.Module):
    """A convolution over what the layer before has made of a sample."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(3, 2 * 36)
        self.conv = torch.nn.Conv2d(2, 24, 3, padding=1).to(memory_format=memory_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.conv(self.enter(x).view(-1, 2, 6, 6)).mean((2, 3))
        return found


class Wide(Layers):
    """fsdp: without channels-last memory, which FSDP2 does not take."""

    def __init__(self, *, fsdp: bool) -> None:
        super().__init__()
        self._memory_format = torch.contiguous_format if fsdp else torch.channels_last

    def build_model(self) -> torch.nn.Module:
        blocks = torch.nn.Sequential(*(Block() for _ in range(2)))
        return torch.nn.Sequential(Picture(self._memory_format), blocks, torch.nn.Linear(24, 2))


def train_wide(
    world: World, where: Path, name: str, layout: dict[str, str], **sections: Any
) -> dict[str, Any]:
    fsdp = layout.get("shard") == "parameters"
    reduction = {} if fsdp else REDUCTION
    return train(world, where, name, layout, task=Wide(fsdp=fsdp), **{**reduction, **sections})


def everything(world: World, directory: str) -> dict[str, Any]:
    """All cases of one launch; without those of sharded parameters where FSDP2 is too old for them."""
    where, size, has_fsdp2 = Path(directory), world.num_ranks, not fsdp2_refusal()
    found: dict[str, Any] = {}

    def run(name: str, layout: dict[str, str], **sections: Any) -> None:
        found[name] = train_wide(world, where, f"{size}-{name}", layout, **sections)

    layouts = {"none": {}, "optimizer": OPTIMIZER, "gradients": GRADIENTS}
    for name, layout in layouts.items():
        run(name, layout)
    if size == 1:
        run("again", {})
        run("later", {}, steps=LATER)
    else:
        if has_fsdp2:
            run("world", WORLD)
        for name, layout in layouts.items():
            run(f"fp32 {name}", layout, precision="fp32", **UNCLIPPED, **BETWEEN_STEPS)
    if size in (2, 4):
        for name, layout in layouts.items():
            run(f"int8 {name}", layout, precision="fp32", **INT8)
    if size == 2:
        for name, layout in layouts.items():
            found[f"overflow {name}"] = train(
                world, where, f"overflow-{name}", layout, steps=STEPS, precision="fp32", task=Overflowing(),
                reduction={"wire": "fp16", "algorithm": "direct"}, guards={"loss_jump_z": 0.0},
            )  # fmt: skip
    continued = [(entry, {}) for entry in CONTINUED[size]]
    continued += [(entry, {"precision": "fp32", **INT8}) for entry in INT8_CONTINUED[size]]
    for (ranks, name, layout), sections in continued:
        if not has_fsdp2 and (name == "world" or layout in (WORLD, NODE)):
            continue
        found[f"{ranks}-{name} continued"] = train_wide(
            world, where, f"{ranks}-{name}", layout, steps=LATER, **sections
        )
    return found
