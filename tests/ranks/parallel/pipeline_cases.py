"""What one rank does in the tests of pipelines: the same training in several, continued in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.errors import HpctrainError
from tests.ranks.parallel.parallel_cases import LATER, WORLD, Block, Layers, train

BLOCKS = 24
# The data-parallel ranks of a stage hold shares of its optimizer.
SHARES = {"pipeline": 2, "micro_batches": 3, "shard": "optimizer"}
# The layouts on each number of ranks. 61 samples in batches of 12: in the last batch of an epoch is one sample.
PIPELINES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"none": {}},
    2: {
        "gpipe": {"pipeline": 2, "schedule": "gpipe", "micro_batches": 3},
        "1f1b": {"pipeline": 2, "schedule": "1f1b", "micro_batches": 4},
        "interleaved": {"pipeline": 2, "schedule": "interleaved", "micro_batches": 4},
        "zero-bubble": {"pipeline": 2, "schedule": "zero-bubble", "micro_batches": 4},
        "selective": {"pipeline": 2, "micro_batches": 2, "activation_checkpointing": "selective"},
        # One data-parallel rank has all of its stage.
        "one share": {"pipeline": 2, "micro_batches": 2, "shard": "optimizer"},
    },
    4: {
        "of 4": {"pipeline": 4, "micro_batches": 4, "activation_checkpointing": "blocks"},
        "of 4 interleaved": {"pipeline": 4, "schedule": "interleaved", "micro_batches": 4},
        "of 2, data 2": {"pipeline": 2, "micro_batches": 3},
        "of 2, data 2, zero-bubble": {"pipeline": 2, "schedule": "zero-bubble", "micro_batches": 2},
        "of 2, shares": SHARES,
        "of 2, shares, gpipe": SHARES | {"schedule": "gpipe", "activation_checkpointing": "selective"},
        "of 2, shares, interleaved": SHARES | {"schedule": "interleaved", "micro_batches": 2},
        "of 2, shares, zero-bubble": SHARES | {"schedule": "zero-bubble", "micro_batches": 2},
        "of 2, data 2, selective": {
            "pipeline": 2,
            "schedule": "interleaved",
            "micro_batches": 2,
            "activation_checkpointing": "selective",
        },
    },
    3: {"of 3": {"pipeline": 3, "micro_batches": 4}},
}
# Runs that are continued: the ranks and layout that have saved, and the layout of those that load.
CONTINUED: dict[int, list[tuple[int, str, dict[str, Any]]]] = {
    1: [],
    2: [(1, "none", PIPELINES[2]["1f1b"])],
    4: [
        (2, "interleaved", PIPELINES[4]["of 2, data 2"]), (2, "gpipe", WORLD), (2, "selective", SHARES),
        (2, "one share", {"shard": "gradients"}), (4, "of 2, shares, zero-bubble", SHARES),
        (4, "of 2, data 2, selective", SHARES),
    ],
    3: [
        (4, "of 4", {}), (4, "of 2, data 2", WORLD), (4, "of 4 interleaved", PIPELINES[3]["of 3"]),
        (4, "of 2, shares", {"shard": "optimizer"}), (4, "of 2, shares, interleaved", PIPELINES[3]["of 3"]),
    ],
}  # fmt: skip


# Runs that begin with the weights of another one, and float16 runs in which a step overflows, with micro-batches of the
# same samples, since each is rounded.
FROM_WEIGHTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"none": {}},
    2: {"1f1b": PIPELINES[2]["1f1b"]},
    4: {"shares, interleaved": PIPELINES[4]["of 2, shares, interleaved"]},
}
OVERFLOWING: dict[int, dict[str, dict[str, Any]]] = {
    2: {"fp16 none": {}, "fp16 pipeline": PIPELINES[2]["1f1b"]},
    4: {"fp16 shares": SHARES | {"micro_batches": 2}},
}


class Deep(Layers):
    """Classifies rows of three numbers by many blocks, of which a pipeline makes stages."""

    def build_model(self) -> torch.nn.Module:
        blocks = torch.nn.Sequential(*(Block(self.dropout) for _ in range(BLOCKS)))
        return torch.nn.Sequential(torch.nn.Linear(3, 5), blocks, torch.nn.Linear(5, 2))

    def pipeline_layers(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        first, blocks, last = model.children()
        return [first, *blocks.children(), last]


class Untold(Layers):
    """Does not say what its layers are."""


class Tied(Deep):
    """Two blocks, far from each other, have one weight."""

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model[1][-1].up.weight = model[1][0].up.weight  # type: ignore[index]
        return model


class Normalised(Deep):
    """Has batch normalisation."""

    def pipeline_layers(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        return [*super().pipeline_layers(model), torch.nn.BatchNorm1d(2)]


def train_in(
    world: World, directory: Path, name: str, layout: dict[str, Any], **options: Any
) -> dict[str, Any]:
    data = {
        "train": str(directory / "data"), "held_out": str(directory / "data"), "global_batch": 12,
        "micro_batches": 1 if "pipeline" in layout else 2, "evaluation_batch": 12,
    }  # fmt: skip
    return train(world, directory, name, layout, **{"task": Deep(), "data": data, **options})


def refusal(world: World, directory: Path, task: Layers, layout: dict[str, Any], **options: Any) -> str:
    try:
        train_in(world, directory, "refused", layout, task=task, **options)
    except HpctrainError as error:
        return str(error) if error.agreed else f"of this rank only: {error}"
    return "nothing was refused"


def everything(world: World, directory: str) -> dict[str, Any]:
    """All cases of one launch."""
    where, size = Path(directory), world.num_ranks
    found = {
        name: train_in(world, where, f"{size}-{name}", layout) for name, layout in PIPELINES[size].items()
    }
    if size == 1:
        found["later"] = train_in(world, where, "1-later", {}, steps=LATER)
    for ranks, name, layout in CONTINUED[size]:
        found[f"{ranks}-{name} continued"] = train_in(world, where, f"{ranks}-{name}", layout, steps=LATER)
    weights = {"weights_from": str(where / "1-later" / "checkpoints")}
    for name, layout in FROM_WEIGHTS.get(size, {}).items():
        found[f"from weights {name}"] = train_in(
            world, where, f"{size}-from-weights-{name}", layout, steps=3, checkpoint=weights
        )
    for name, layout in OVERFLOWING.get(size, {}).items():
        found[name] = train_in(
            world,
            where,
            name,
            layout,
            task=Deep(overflow=True),
            precision="fp16",
            guards={"loss_jump_z": 0.0},
        )
    if size == 2:
        layout = PIPELINES[2]["1f1b"]
        found["refused"] = {
            "untold": refusal(world, where, Untold(), layout),
            "tied": refusal(world, where, Tied(), layout),
            "batch norm": refusal(world, where, Normalised(), layout),
            "batch": refusal(world, where, Deep(), {**layout, "micro_batches": 5}),
            # Of the last layer, which only the second rank has.
            "weights": refusal(
                world, where, Deep(), layout, checkpoint={**weights, "weights_map": {"2.": "3."}}
            ),
        }
    if size == 3:
        found["refused"] = {"ranks": refusal(world, where, Deep(), PIPELINES[2]["1f1b"])}
    return found
