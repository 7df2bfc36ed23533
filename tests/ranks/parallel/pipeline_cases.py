"""What one rank does in the tests of pipelines: the same training in several, continued in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.data import TransformContext
from hpctrain.errors import HpctrainError
from hpctrain.train.task.task import Fields
from tests.ranks.parallel.parallel_cases import LATER, STEPS, WORLD, Block, Layers, train

BLOCKS = 24
LENGTH = 6  # of sequences in training; longer ones are for evaluation
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
# Layouts that train with samples of several lengths, and evaluate on longer ones.
OF_LENGTHS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"none": {}},
    2: {"1f1b": PIPELINES[2]["1f1b"], "zero-bubble": PIPELINES[2]["zero-bubble"]},
    4: {
        "of 2, data 2": PIPELINES[4]["of 2, data 2"],
        "of 2, shards": {"pipeline": 2, "micro_batches": 3, "shard": "parameters"},
    },
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


class TwiceNamed(Deep):
    """All blocks share a buffer, and two blocks of one stage a weight."""

    def build_model(self) -> torch.nn.Module:
        shared = torch.linspace(0.5, 1.0, 5)
        blocks = torch.nn.Sequential(*(Scaled(self.dropout, by=shared) for _ in range(BLOCKS)))
        blocks[1].up.weight = blocks[0].up.weight  # type: ignore[union-attr]
        return torch.nn.Sequential(torch.nn.Linear(3, 5), blocks, torch.nn.Linear(5, 2))


class Scaled(Block):
    """A block whose output is scaled."""

    def __init__(self, dropout: float, *, by: torch.Tensor) -> None:
        super().__init__(dropout)
        self.register_buffer("by", by)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.get_buffer("by")


class Sequences(Deep):
    """Classifies each of a sequence's rows of three numbers."""

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        assert len(fields["label"]) > 0
        return functional.cross_entropy(model(fields["x"]).flatten(0, 1), fields["label"].flatten())

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"nats": float(self.loss(model, fields))}


class Positioned(Sequences):
    """Takes no sequences of more than LENGTH rows."""

    def build_model(self) -> torch.nn.Module:
        first, *others = super().build_model().children()
        return torch.nn.Sequential(torch.nn.Sequential(Positions(), first), *others)


class Positions(torch.nn.Module):
    """Adds to each row of a sequence what belongs to its place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(LENGTH, 3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.table[: values.shape[1]]


class Meddled(Deep):
    """Its first layer has a running mean of its own. On one rank that is not finite in the third step, and in the fifth
    a bias changes."""

    def __init__(self, *, is_meddled_with: bool, micro_batches: int) -> None:
        super().__init__()
        self.meddler = Meddler(is_meddled_with, micro_batches)

    def build_model(self) -> torch.nn.Module:
        first, *others = super().build_model().children()
        return torch.nn.Sequential(torch.nn.Sequential(self.meddler, first), *others)


class Meddler(torch.nn.Module):
    mean: torch.Tensor

    def __init__(self, acts: bool, micro_batches: int) -> None:
        super().__init__()
        self.acts, self.micro_batches, self.calls = acts, micro_batches, 0
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled() and not values.is_meta:
            step, self.calls = self.calls // self.micro_batches + 1, self.calls + 1
            if self.acts and step == 3:
                values = values * torch.inf
            if self.acts and step == 5:
                self.bias.data[1] += 0.5
            with torch.no_grad():
                self.mean.lerp_(values.mean(0), 0.1)
        return values + self.bias


def meddled(world: World, directory: Path | str) -> tuple[str, list[float]]:
    """Returns the error, and the running mean at its end if this rank has it, of two stages on two ranks each."""
    layout = PIPELINES[4]["of 2, data 2"]
    task = Meddled(is_meddled_with=world.rank == 0, micro_batches=layout["micro_batches"])
    text = refusal(world, Path(directory), task, layout)
    mean: torch.Tensor | None = task.meddler._buffers["mean"]
    return text, [] if mean is None else mean.tolist()


def cropped(fields: dict[str, NDArray[Any]], context: TransformContext) -> dict[str, NDArray[Any]]:
    """Leaves of each sequence 4 to 6 rows, in all of a global batch equally many."""
    length = LENGTH - context.start // 12 % 3
    return {name: array[:, :length] if array.ndim > 1 else array for name, array in fields.items()}


def train_on_sequences(
    world: World, directory: Path, name: str, layout: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Evaluates not only at the end, but also between steps."""
    data = {
        **data_of(directory, layout, train="sequences", held_out="longer"),
        "transform": "tests.ranks.parallel.pipeline_cases:cropped",
    }
    telemetry = {"evaluate_every_steps": 4}
    return train(
        world,
        directory,
        name,
        layout,
        **{"task": Sequences(), "data": data, "telemetry": telemetry, **options},
    )


def data_of(
    directory: Path, layout: dict[str, Any], *, train: str = "data", held_out: str = "data"
) -> dict[str, Any]:
    """The section [data]; train, held_out: folders in `directory`."""
    return {
        "train": str(directory / train), "held_out": str(directory / held_out), "global_batch": 12,
        "micro_batches": 1 if "pipeline" in layout else 2, "evaluation_batch": 12,
    }  # fmt: skip


def train_in(
    world: World, directory: Path, name: str, layout: dict[str, Any], **options: Any
) -> dict[str, Any]:
    data = data_of(directory, layout)
    return train(world, directory, name, layout, **{"task": Deep(), "data": data, **options})


def refusal(world: World, directory: Path, task: Layers, layout: dict[str, Any], **options: Any) -> str:
    train_it = train_on_sequences if isinstance(task, Sequences) else train_in
    try:
        train_it(world, directory, "refused", layout, task=task, **options)
    except HpctrainError as error:
        return str(error) if error.agreed else f"of this rank only: {error}"
    return "nothing was refused"


def everything(world: World, directory: str) -> dict[str, Any]:
    """All cases of one launch."""
    where, size = Path(directory), world.num_ranks
    found: dict[str, Any] = {
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
    for name, layout in OF_LENGTHS.get(size, {}).items():
        found[f"of lengths {name}"] = train_on_sequences(world, where, f"{size}-of-lengths-{name}", layout)
    if size == 1:
        found["twice named"] = train_in(world, where, "1-twice-named", {}, task=TwiceNamed(), steps=LATER)
    if size == 2:
        for steps in (STEPS, LATER):
            found["twice named"] = train_in(
                world, where, "2-twice-named", PIPELINES[2]["gpipe"], task=TwiceNamed(), steps=steps
            )
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
            # Of samples in evaluation that the model does not take.
            "lengths": refusal(world, where, Positioned(), layout),
        }
    if size == 4:
        found["meddled"] = meddled(world, where)
    if size == 3:
        found["refused"] = {"ranks": refusal(world, where, Deep(), PIPELINES[2]["1f1b"])}
    return found
