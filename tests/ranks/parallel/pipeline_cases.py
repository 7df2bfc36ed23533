"""A deep classifier of rows in pipelines, continued in other layouts."""

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
from tests.ranks.parallel.layouts import LATER, STEPS, Family, Found, Launch, Layout, data_section, train
from tests.ranks.parallel.parallel_cases import WORLD, Block, Layers

BLOCKS = 24
LENGTH = 6  # of sequences in training; longer ones are for evaluation
GPIPE = {"pipeline": 2, "schedule": "gpipe", "micro_batches": 3}
ONE_F_ONE_B = {"pipeline": 2, "schedule": "1f1b", "micro_batches": 4}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero-bubble", "micro_batches": 4}
STAGES = {"pipeline": 2, "micro_batches": 3}
OF_3 = {"pipeline": 3, "micro_batches": 4}
# The data-parallel ranks of a stage hold shares of its optimizer.
SHARES = STAGES | {"shard": "optimizer"}
INTERLEAVED_SHARES = SHARES | {"schedule": "interleaved", "micro_batches": 2}


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


def meddled(world: World, directory: Path) -> tuple[str, list[float]]:
    """Returns the error, and the running mean at its end if this rank has it, of two stages on two ranks each."""
    task = Meddled(is_meddled_with=world.rank == 0, micro_batches=STAGES["micro_batches"])
    text = refusal(world, directory, task, STAGES)
    mean: torch.Tensor | None = task.meddler._buffers["mean"]
    return text, [] if mean is None else mean.tolist()


def cropped(fields: dict[str, NDArray[Any]], context: TransformContext) -> dict[str, NDArray[Any]]:
    """Leaves of each sequence 4 to 6 rows, in all of a global batch equally many."""
    length = LENGTH - context.start // 12 % 3
    return {name: array[:, :length] if array.ndim > 1 else array for name, array in fields.items()}


def train_on_sequences(world: World, directory: Path, name: str, layout: Layout, **options: Any) -> Found:
    """Evaluates not only at the end, but also between steps."""
    data = {
        **data_section(directory, layout, train="sequences", held_out="longer"),
        "transform": "tests.ranks.parallel.pipeline_cases:cropped",
    }
    options = {"task": Sequences(), "data": data, "telemetry": {"evaluate_every_steps": 4}, **options}
    return train(world, directory, name, layout, **options)


def train_in(world: World, directory: Path, name: str, layout: Layout, **options: Any) -> Found:
    return train(world, directory, name, layout, **{"task": Deep(), **options})


def refusal(world: World, directory: Path, task: Layers, layout: Layout, **options: Any) -> str:
    train_it = train_on_sequences if isinstance(task, Sequences) else train_in
    try:
        train_it(world, directory, "refused", layout, task=task, **options)
    except HpctrainError as error:
        return str(error) if error.agreed else f"of this rank only: {error}"
    return "nothing was refused"


def weights_of(where: Path) -> dict[str, str]:
    return {"weights_from": str(where / "1-later" / "checkpoints")}


def from_weights_and_of_lengths(
    world: World, where: Path, *, from_weights: dict[str, Layout], of_lengths: dict[str, Layout]
) -> Found:
    """Runs that begin with the weights of another one, and runs with samples of several lengths, which evaluate on
    longer ones."""
    found, size = {}, world.num_ranks
    for name, layout in from_weights.items():
        found[f"from weights {name}"] = train_in(
            world, where, f"{size}-from-weights-{name}", layout, steps=3, checkpoint=weights_of(where)
        )
    for name, layout in of_lengths.items():
        found[f"of lengths {name}"] = train_on_sequences(world, where, f"{size}-of-lengths-{name}", layout)
    return found


def on_one(world: World, where: Path) -> Found:
    found = from_weights_and_of_lengths(world, where, from_weights={"none": {}}, of_lengths={"none": {}})
    found["twice named"] = train_in(world, where, "1-twice-named", {}, task=TwiceNamed(), steps=LATER)
    return found


def on_two(world: World, where: Path) -> Found:
    found = from_weights_and_of_lengths(
        world,
        where,
        from_weights={"1f1b": ONE_F_ONE_B},
        of_lengths={"1f1b": ONE_F_ONE_B, "zero-bubble": ZERO_BUBBLE},
    )
    for steps in (STEPS, LATER):
        found["twice named"] = train_in(world, where, "2-twice-named", GPIPE, task=TwiceNamed(), steps=steps)
    # Of the last layer, which only the second rank has.
    wrong = {**weights_of(where), "weights_map": {"2.": "3."}}
    found["refused"] = {
        "untold": refusal(world, where, Untold(), ONE_F_ONE_B),
        "tied": refusal(world, where, Tied(), ONE_F_ONE_B),
        "batch norm": refusal(world, where, Normalised(), ONE_F_ONE_B),
        "batch": refusal(world, where, Deep(), {**ONE_F_ONE_B, "micro_batches": 5}),
        "weights": refusal(world, where, Deep(), ONE_F_ONE_B, checkpoint=wrong),
        # Of samples in evaluation that the model does not take.
        "lengths": refusal(world, where, Positioned(), ONE_F_ONE_B),
    }
    return found


def on_four(world: World, where: Path) -> Found:
    found = from_weights_and_of_lengths(
        world,
        where,
        from_weights={"shares, interleaved": INTERLEAVED_SHARES},
        of_lengths={"of 2, data 2": STAGES, "of 2, shards": STAGES | {"shard": "parameters"}},
    )
    return found | {"meddled": meddled(world, where)}


def on_three(world: World, where: Path) -> Found:
    return {"refused": {"ranks": refusal(world, where, Deep(), ONE_F_ONE_B)}}


# 61 samples in batches of 12: in the last batch of an epoch is one sample. The micro-batches of float16 runs are of the
# same samples, since each is rounded.
FAMILY = Family(
    cases=__name__,
    train=train_in,
    overflows={"task": Deep(overflow=True)},
    reference="4-of 2, data 2, zero-bubble",
    launches=[
        Launch(ranks=1, layouts={"none": {}}, more=on_one),
        Launch(
            ranks=2,
            layouts={
                "gpipe": GPIPE,
                "1f1b": ONE_F_ONE_B,
                "interleaved": {"pipeline": 2, "schedule": "interleaved", "micro_batches": 4},
                "zero-bubble": ZERO_BUBBLE,
                "selective": {"pipeline": 2, "micro_batches": 2, "activation_checkpointing": "selective"},
                # One data-parallel rank has all of its stage.
                "one share": {"pipeline": 2, "micro_batches": 2, "shard": "optimizer"},
            },
            continued={"1-none": ONE_F_ONE_B},
            overflowing={"none": {}, "1f1b": ONE_F_ONE_B},
            more=on_two,
        ),
        Launch(
            ranks=4,
            layouts={
                "of 4": {"pipeline": 4, "micro_batches": 4, "activation_checkpointing": "blocks"},
                "of 4 interleaved": {"pipeline": 4, "schedule": "interleaved", "micro_batches": 4},
                "of 2, data 2": STAGES,
                "of 2, data 2, zero-bubble": ZERO_BUBBLE | {"micro_batches": 2},
                "of 2, shares": SHARES,
                "of 2, shares, gpipe": SHARES | GPIPE | {"activation_checkpointing": "selective"},
                "of 2, shares, interleaved": INTERLEAVED_SHARES,
                "of 2, shares, zero-bubble": SHARES | {"schedule": "zero-bubble", "micro_batches": 2},
                "of 2, data 2, selective": {
                    "pipeline": 2,
                    "schedule": "interleaved",
                    "micro_batches": 2,
                    "activation_checkpointing": "selective",
                },
            },
            continued={
                "2-interleaved": STAGES,
                "2-gpipe": WORLD,
                "2-selective": SHARES,
                "2-one share": {"shard": "gradients"},
                "4-of 2, shares, zero-bubble": SHARES,
                "4-of 2, data 2, selective": SHARES,
            },
            overflowing={"shares": SHARES | {"micro_batches": 2}},
            more=on_four,
        ),
        Launch(
            ranks=3,
            layouts={"of 3": OF_3},
            continued={
                "4-of 4": {},
                "4-of 2, data 2": WORLD,
                "4-of 4 interleaved": OF_3,
                "4-of 2, shares": {"shard": "optimizer"},
                "4-of 2, shares, interleaved": OF_3,
            },
            more=on_three,
        ),
    ],
)
