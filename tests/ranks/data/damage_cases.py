"""What a rank does in the tests of damaged data: training that leaves samples out, and training that stops."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.errors import DataError
from tests.ranks.train.training_cases import Classifier, train
from tests.run_files import records_of

CHECKED: dict[str, dict[str, Any]] = {
    "run": {"precision": "fp64", "steps": 32},
    "data": {"check": "first-epoch"},
    "reduction": {"bucket_mb": 0.004, "algorithm": "flat"},
}


class Choosy(Classifier):
    """Leaves samples out by itself: what a run on one rank without damage then learns is the reference."""

    def __init__(self, left_out: list[int]) -> None:
        super().__init__()
        self.left_out = torch.tensor(left_out)

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        kept = ~torch.isin(fields["id"], self.left_out)
        return super().loss(model, {name: tensor[kept] for name, tensor in fields.items()})


def skip(world: World, directory: str) -> dict[str, Any]:
    """Training on damaged data that leaves out what is damaged."""
    where = Path(directory)
    task = Classifier()
    data = {
        "check": "first-epoch", "on_damage": "skip", "train": str(where / "damaged"),
        "held_out": str(where / "damaged"), "micro_batches": 2,
    }  # fmt: skip
    found = train(world, where, "skip", task=task, **{**CHECKED, "data": data})
    steps = records_of(where / "skip", rank=world.rank)
    return {
        **found,
        "seen": task.seen,
        "skipped": [step["skipped_samples"] for step in steps],
        "damage": records_of(where / "skip", "damage", rank=world.rank),
    }


def stop_and_go_on(world: World, directory: str) -> dict[str, Any]:
    """Training that stops at damage, and goes on once the shard is restored; and one that met none."""
    where = Path(directory)
    whole = train(world, where, "whole", task=Classifier(), **CHECKED)
    damaged = {**CHECKED, "data": {**CHECKED["data"], "train": str(where / "late")}}
    message = ""
    try:
        train(world, where, "late-run", task=Classifier(), **damaged)
    except DataError as error:
        message = f"{'agreed' if error.agreed else 'alone'}: {error}"
    steps = len(records_of(where / "late-run", rank=world.rank))
    world.barrier()
    if world.rank == 0:
        for shard in (where / "data").glob("*.h5"):
            shutil.copy(shard, where / "late" / shard.name)
    world.barrier()
    resumed = train(world, where, "late-run", task=Classifier(), resume="auto", **damaged)
    return {
        "message": message,
        "steps": steps,
        "resumed": resumed["fingerprint"],
        "losses": resumed["losses"],
        "whole": whole["fingerprint"],
        "whole_losses": whole["losses"],
    }


def everything(world: World, directory: str) -> dict[str, Any]:
    return {"skip": skip(world, directory), "stop": stop_and_go_on(world, directory)}
