"""Runs of one and of two ranks, the second of them slow, as their directories tell them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import pack_arrays
from tests.sessions import carried_out
from tests.tiny_task import TinyTask

STEPS = 60
STEP_S = 0.004


class Task(TinyTask):
    """Steps of STEP_S, and three times as long on rank 1."""

    def __init__(self, rank: int) -> None:
        self.seconds = STEP_S * (3 if rank == 1 else 1)

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().loss(model, fields)


def train(where: Path, *, num_ranks: int) -> Path:
    """Trains on so many ranks, which are threads. Returns the run directory."""
    directory = where / f"run-{num_ranks}"
    recipe = {
        "run": {"directory": str(directory), "steps": STEPS},
        "task": {"target": "tests:Task"},
        "data": {"train": str(where / "data"), "held_out": str(where / "data"), "global_batch": 24},
        "checkpoint": {"every_steps": 10},
        "telemetry": {"ranks": "all"},
    }  # fmt: skip

    def rank_main(world: World) -> object:
        return carried_out(recipe, Task(world.rank), world=world, nodes=["n0", "n1"][:num_ranks])

    run_threads(num_ranks, rank_main, timeout_s=300)
    return directory


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run directories, of two ranks and of one."""
    where = tmp_path_factory.mktemp("runs")
    pack_arrays(where / "data", {"x": np.ones((96, 4), np.float32)})
    return [train(where, num_ranks=num_ranks) for num_ranks in (2, 1)]
