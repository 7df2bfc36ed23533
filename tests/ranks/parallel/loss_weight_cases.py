"""What one rank does in the tests of losses with weights: a model of unequal sequences in several layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.errors import HpctrainError
from hpctrain.reduce import SPARSE_WIRES
from hpctrain.train.task.task import Fields
from tests.ranks.parallel.layouts import NODES, STEPS, Family, Found, Launch, Layout, train

PIPELINE = {"pipeline": 2, "micro_batches": 3}
# Of each number of ranks: name -> layout, kind of the task, other settings.
LAYOUTS: dict[int, dict[str, tuple[Layout, str, dict[str, Any]]]] = {
    1: {
        "none": ({}, "pair", {"micro_batches": 1}),
        "micro": ({}, "method", {"micro_batches": 5}),
        "large": ({}, "pair of thousands", {"micro_batches": 1}),
    },
    2: {
        "none": ({}, "pair", {}),
        "large": ({}, "pair of thousands", {"micro_batches": 3}),
        "optimizer": ({"shard": "optimizer"}, "pair", {"micro_batches": 3}),
        "gradients": ({"shard": "gradients"}, "method", {}),
        "parameters": ({"shard": "parameters"}, "pair", {"micro_batches": 5}),
        "tensor": ({"tensor": 2}, "pair", {"micro_batches": 3}),
        "pipeline": (PIPELINE, "pair", {"micro_batches": 1}),
        "pipeline by method": (PIPELINE, "method", {"micro_batches": 1}),
    },
    3: {
        "none": ({}, "method", {"micro_batches": 5}),
        "parameters": ({"shard": "parameters"}, "method", {}),
    },
    4: {
        "none": ({}, "pair", {"micro_batches": 3}),
        "parameters, tensor": ({"shard": "parameters", "tensor": 2}, "pair", {}),
        # After another layout: PyTorch gives the DTensors of the second model meshes of the first.
        "pipeline, tensor": (PIPELINE | {"tensor": 2}, "pair", {"micro_batches": 1}),
    },
}


# Of each number of ranks, on several nodes: wire format -> kinds of the task.
OF_SAMPLES = ("samples", "samples weighed")
WIRES: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "fp16": ("pair", *OF_SAMPLES),
        "bf16": ("pair",),
        "int8": ("pair", "uneven pair", *OF_SAMPLES),
        "top-k": ("pair", "uneven pair", *OF_SAMPLES),
        "low-rank": ("pair", "uneven pair", "uneven method"),
    },
    3: {"low-rank": ("uneven pair",)},
    4: {"top-k": ("pair", "uneven pair")},
}
RESUMED = ("fp16", "top-k")
BEYOND_DENSE = 28  # steps; in the first 20 the sparse formats send everything


class Masked:
    """Predicts the next token; positions after a sequence's length are not counted. Many sequences have none."""

    def build_model(self) -> torch.nn.Module:
        # A stage of a pipeline does not end between layers that tensor groups split as a pair.
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
            for _ in range(2)
        ]
        return torch.nn.Sequential(torch.nn.Embedding(17, 8), *blocks, torch.nn.Linear(8, 17))

    def tensor_plan(self) -> dict[str, str]:
        return {"1.0": "column", "1.2": "row", "2.0": "column", "2.2": "row"}

    def pipeline_layers(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        return list(model.children())

    def mean(
        self, model: torch.nn.Module, fields: Fields, valid: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = fields["tokens"][:, :-1], fields["tokens"][:, 1:]
        counted = torch.arange(target.shape[1])[None] < fields["length"][:, None]
        if valid is not None:
            counted = counted & valid[:, None]
        losses = functional.cross_entropy(model(inputs).flatten(0, 1), target.flatten(), reduction="none")
        number = counted.sum()
        return (losses * counted.flatten()).sum() / number, number  # 0 / 0 where nothing is counted

    def loss(self, model: torch.nn.Module, fields: Fields) -> Any:
        return self.mean(model, fields)

    def metrics(self, model: torch.nn.Module, fields: Fields) -> Any:
        mean, number = self.mean(model, fields)
        return {"nats": float(mean)}, number


class ByMethod(Masked):
    def loss(self, model: torch.nn.Module, fields: Fields) -> Any:
        return self.mean(model, fields)[0]

    def metrics(self, model: torch.nn.Module, fields: Fields) -> Any:
        return {"nats": float(self.mean(model, fields)[0])}

    def weight(self, fields: Fields) -> float:
        return float(fields["length"].sum())


class OfThousands(Masked):
    """The weights are 4096 times as large, which must change nothing."""

    def loss(self, model: torch.nn.Module, fields: Fields) -> Any:
        mean, number = self.mean(model, fields)
        return mean, 4096.0 * float(number)


def uneven(model: torch.nn.Module) -> float:
    """Returns 2**-10, 1 or 2**10: the same on all ranks in a step, and another one in another step."""
    value = next(model.parameters()).detach().flatten()[0]
    return 2.0 ** (10 * (int(value.abs() * 2**30) % 3 - 1))


class Uneven(Masked):
    """The weights of a step are all larger or smaller by a factor, which must change nothing."""

    def loss(self, model: torch.nn.Module, fields: Fields) -> Any:
        mean, number = self.mean(model, fields)
        return mean, float(number) * uneven(model)


class UnevenByMethod(ByMethod):
    def build_model(self) -> torch.nn.Module:
        self.model = super().build_model()
        return self.model

    def weight(self, fields: Fields) -> float:
        return super().weight(fields) * uneven(self.model)


class OfSamples(Masked):
    """A mean over samples, without weights."""

    def loss(self, model: torch.nn.Module, fields: Fields) -> Any:
        inputs, target = fields["tokens"][:, :-1], fields["tokens"][:, 1:]
        return functional.cross_entropy(model(inputs).flatten(0, 1), target.flatten())


class OfSamplesWeighed(OfSamples):
    def weight(self, fields: Fields) -> float:
        return 1e4 * len(fields["tokens"])


class Normed(Masked):
    """With batch norm; about every second rank and every fourth step has nothing to count."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Embedding(17, 8), torch.nn.Flatten(0, 1), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 17)
        )

    def mean(
        self, model: torch.nn.Module, fields: Fields, valid: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rare = fields["length"] * (fields["tokens"][:, 0] < 3)
        return super().mean(lambda x: model(x).unflatten(0, x.shape), {**fields, "length": rare}, valid)  # type: ignore[arg-type]


class TakesValid(Masked):
    def loss(self, model: torch.nn.Module, fields: Fields, valid: torch.Tensor) -> Any:  # type: ignore[override]
        return self.mean(model, fields, valid)[0]

    def metrics(self, model: torch.nn.Module, fields: Fields) -> Any:
        return {"nats": float(self.mean(model, fields)[0])}

    def weight(self, fields: Fields, valid: torch.Tensor | None = None) -> torch.Tensor:
        lengths = fields["length"]
        return (lengths if valid is None else lengths * valid).sum()


TASKS: dict[str, Callable[[], Any]] = {
    "pair": Masked, "method": ByMethod, "pair of thousands": OfThousands,
    "uneven pair": Uneven, "uneven method": UnevenByMethod, "samples": OfSamples,
    "samples weighed": OfSamplesWeighed, "norm": Normed,
}  # fmt: skip


class OnSomeRanks(Masked):
    """Returns a weight on rank 1 only."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def loss(self, model: torch.nn.Module, fields: Fields) -> Any:
        mean, number = self.mean(model, fields)
        return (mean, number) if self.rank == 1 else mean


class Wrong(Masked):
    def __init__(self, weight: Any) -> None:
        self.wrong = weight

    def loss(self, model: torch.nn.Module, fields: Fields) -> Any:
        return self.mean(model, fields)[0], self.wrong


class CountsNothing(Masked):
    def loss(self, model: torch.nn.Module, fields: Fields) -> Any:
        return self.mean(model, fields)[0], 0


def in_words(world: World, where: Path, name: str, task: Any, **data: Any) -> str:
    """Returns the error that all ranks raise."""
    with pytest.raises(HpctrainError) as caught:
        run(world, where, name, task, **data)
    assert caught.value.agreed
    return f"{caught.value.exit_code.name} {caught.value}"


def run(
    world: World, where: Path, name: str, task: Any, layout: Layout | None = None, *, steps: int = STEPS,
    reduction: dict[str, Any] | None = None, **data: Any,
) -> dict[str, Any]:  # fmt: skip
    settings = {
        "train": str(where / "data"), "held_out": str(where / "data"), "global_batch": 12, "evaluation_batch": 5,
        "micro_batches": 2,
    }  # fmt: skip
    # Tensor groups lie on one node; wire formats are those between nodes.
    nodes = ["a"] * world.num_ranks if reduction is None else NODES[world.num_ranks]
    return train(
        world, where, name, layout or {}, task=task, nodes=nodes, steps=steps, data=settings | data,
        reduction=reduction or {},
    )  # fmt: skip


def with_wire(world: World, where: Path, wire: str) -> dict[str, Any]:
    """Runs with one wire format; also one that is stopped and continued, and one that is not."""
    reduction = {"wire": wire, "algorithm": "flat" if wire in SPARSE_WIRES else "direct"}
    steps = BEYOND_DENSE if wire in SPARSE_WIRES else STEPS
    found = {
        kind: run(
            world, where, f"{world.num_ranks}-{wire}-{kind}", TASKS[kind](), reduction=reduction, steps=steps,
            micro_batches=3 if "method" in kind else 1,
        )
        for kind in WIRES[world.num_ranks][wire]
    }  # fmt: skip
    if world.num_ranks == 2 and wire in RESUMED:
        for name in ("pair", "whole"):
            found[f"{name} later"] = run(
                world,
                where,
                f"2-{wire}-{name}",
                Masked(),
                reduction=reduction,
                micro_batches=1,
                steps=steps + 3,
            )
    return found


def in_layouts(world: World, where: Path, name: str, layout: Layout, *, kind: str, **data: Any) -> Found:
    return run(world, where, name, TASKS[kind](), layout, **data)


def more(world: World, where: Path) -> Found:
    """What one number of ranks does after its layouts."""
    size = world.num_ranks
    found: Found = {"wires": {wire: with_wire(world, where, wire) for wire in WIRES.get(size, ())}}
    if size in (1, 3):
        found["padded"] = run(world, where, f"{size}-padded", TakesValid(), last_batch="pad")
    if size == 1:
        found["longer"] = run(world, where, "1-longer", Masked(), micro_batches=1, steps=BEYOND_DENSE)
    if size <= 2:
        for name, sync in (("plain norm", False), ("norm", size > 1)):
            found[name] = run(
                world, where, f"{size}-{name}", Normed(), reduction={"sync_batch_norm": sync}, micro_batches=1
            )
    if size == 2:
        found["mixture"] = in_words(world, where, "mixture", OnSomeRanks(world.rank))
        wrong = {"nan": float("nan"), "negative": -1, "bool": True, "shape": torch.ones(2), "text": "12"}
        for name, weight in wrong.items():
            found[name] = in_words(world, where, name, Wrong(weight))
        found["nothing"] = run(world, where, "nothing", CountsNothing())
    return found


FAMILY = Family(
    cases=__name__,
    train=in_layouts,
    reference="1-micro",
    launches=[
        Launch(
            ranks=ranks,
            layouts={name: layout for name, (layout, _, _) in of.items()},
            options={name: {"kind": kind, **data} for name, (_, kind, data) in of.items()},
            more=more,
        )
        for ranks, of in LAYOUTS.items()
    ],
)
