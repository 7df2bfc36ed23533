"""A whole run with batch normalisation over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data import pack_arrays
from hpctrain.train.task.sync_batch_norm import communicates_in_forward
from tests.unit.run.training_cases import Task, run

NUM_SAMPLES = 44  # 3 batches of 14, and one of 2: on three ranks the last has none


class Normalised(Task):
    def __init__(self) -> None:
        super().__init__()
        self.model: torch.nn.Module | None = None
        self.batches: list[int] = []

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 10)
        )
        generator = torch.Generator().manual_seed(1)  # of its own: ranks that are threads share torch's
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)
        self.model = model
        return model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.batches.append(len(fields["id"]))
        return super().loss(model, {**fields, "image": fields["image"].double()})

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        return super().metrics(model, {**fields, "image": fields["image"].double()})


def train(directory: Path, num_ranks: int, *, micro_batches: int = 1) -> list[Normalised]:
    random = np.random.default_rng(0)
    pack_arrays(
        directory / "data",
        {
            "image": random.normal(size=(NUM_SAMPLES, 5)).astype(np.float32),
            "label": random.integers(0, 10, NUM_SAMPLES),
            "id": np.arange(NUM_SAMPLES),
        },
    )
    sections: dict[str, Any] = {
        "run": {"directory": str(directory / "run"), "steps": None, "epochs": 2, "precision": "fp64"},
        "data": {"global_batch": 14, "micro_batches": micro_batches},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "reduction": {"sync_batch_norm": True},
    }

    def case(world: World) -> Normalised:
        task = Normalised()
        run(directory, task, world=world, **sections)
        return task

    return run_threads(num_ranks, case, timeout_s=300)


def state_of(task: Normalised) -> dict[str, torch.Tensor]:
    assert task.model is not None
    return task.model.state_dict()


def test_three_ranks_train_as_one_also_where_one_has_no_samples(tmp_path: Path) -> None:
    three = train(tmp_path / "three", 3)
    (one,) = train(tmp_path / "one", 1)
    assert 0 in three[2].batches
    assert three[0].model is not None
    assert communicates_in_forward(three[0].model)
    expected = state_of(one)
    for task in three:
        found = state_of(task)
        assert list(found) == list(expected)
        for name, value in found.items():
            # The loss is a float32 one: torch.testing's float64 bounds do not hold.
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_more_micro_batches_than_samples_end_on_all_ranks(tmp_path: Path, num_ranks: int) -> None:
    tasks = train(tmp_path, num_ranks, micro_batches=3)
    assert len({len(task.batches) for task in tasks}) == 1
    states = [state_of(task) for task in tasks]
    assert all(bool(value.isfinite().all()) for value in states[0].values())
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())
