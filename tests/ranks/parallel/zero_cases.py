"""What one rank does in the tests of sharded optimizers and gradients: trainings in several layouts, some continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World
from tests.ranks.parallel.layouts import LATER, Family, Found, Launch, Layout, train
from tests.ranks.parallel.parallel_cases import NODE, WORLD, Layers
from tests.ranks.parallel.sharded_reduction_cases import Overflowing

OPTIMIZER, GRADIENTS = {"shard": "optimizer"}, {"shard": "gradients"}
# Small buckets, so that there are several of each model, and parameters that are larger than one.
REDUCTION = {"reduction": {"algorithm": "hierarchical", "bucket_mb": 0.004}}
UNCLIPPED = {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}}
# The parameters of a step are gathered during the next one, or before what comes between.
BETWEEN_STEPS = {"telemetry": {"evaluate_every_steps": 3}, "checkpoint": {"every_steps": 7}}
INT8 = {"reduction": {"algorithm": "direct", "bucket_mb": 0.004, "wire": "int8"}}
LAYOUTS: dict[str, Layout] = {"none": {}, "optimizer": OPTIMIZER, "gradients": GRADIENTS}
INT8_CONTINUED: dict[int, dict[str, Layout]] = {
    4: {"2-int8 none": GRADIENTS, "2-int8 optimizer": {}},
    3: {"4-int8 gradients": OPTIMIZER},
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


def train_wide(world: World, where: Path, name: str, layout: Layout, **sections: Any) -> Found:
    fsdp = layout.get("shard") == "parameters"
    reduction = {} if fsdp else REDUCTION
    return train(world, where, name, layout, **{"task": Wide(fsdp=fsdp), **reduction, **sections})


def in_other_formats(world: World, where: Path) -> Found:
    """Trainings in float32, and with gradients in int8."""
    found, size = {}, world.num_ranks
    kinds: dict[str, dict[str, Any]] = {"fp32": UNCLIPPED | BETWEEN_STEPS, "int8": INT8}
    for kind in ("fp32",) if size == 3 else kinds:
        for name, layout in LAYOUTS.items():
            run = f"{size}-{kind} {name}"
            found[f"{kind} {name}"] = train_wide(world, where, run, layout, precision="fp32", **kinds[kind])
    for run, layout in INT8_CONTINUED.get(size, {}).items():
        found[f"{run} continued"] = train_wide(
            world, where, run, layout, steps=LATER, precision="fp32", **INT8
        )
    return found


FAMILY = Family(
    cases=__name__,
    train=train_wide,
    overflows={
        "task": Overflowing(),
        "precision": "fp32",
        "reduction": {"wire": "fp16", "algorithm": "direct"},
    },
    reference="1-reference",
    launches=[
        Launch(ranks=1, layouts={**LAYOUTS, "again": {}, "reference": {}}),
        Launch(
            ranks=2,
            layouts={**LAYOUTS, "world": WORLD},
            continued={"1-none": OPTIMIZER, "1-again": GRADIENTS},
            overflowing=LAYOUTS,
            more=in_other_formats,
        ),
        Launch(
            ranks=4,
            layouts={**LAYOUTS, "world": WORLD},
            continued={"2-optimizer": GRADIENTS, "2-gradients": {}, "2-world": OPTIMIZER, "2-none": NODE},
            more=in_other_formats,
        ),
        Launch(
            ranks=3,
            layouts={**LAYOUTS, "world": WORLD},
            continued={"4-optimizer": WORLD, "4-gradients": OPTIMIZER, "4-world": GRADIENTS},
            more=in_other_formats,
        ),
    ],
)
