"""`run.channels_last`: another order in memory, the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from tests.unit.run.training_cases import Task, run


class Convolutions(Task):
    """Two convolutions, whose model of the last run is kept."""

    def build_model(self) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 4, 3),
            torch.nn.Flatten(),
            torch.nn.Linear(64, 10),
        )
        for parameter in self.model.parameters():
            torch.nn.init.uniform_(parameter, -0.2, 0.2, generator=generator)
        return self.model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(fields["image"].reshape(-1, 1, 8, 8)), fields["label"])

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        return {"loss": float(self.loss(model, fields))}


def trained(
    where: Path, name: str, *, steps: int, channels_last: bool, num_ranks: int, sections: dict[str, Any]
) -> list[torch.Tensor]:
    """Begins or resumes a run. Returns the parameters at its end."""
    tasks = [Convolutions() for _ in range(num_ranks)]

    def on_rank(world: World) -> None:
        settings = {"steps": steps, "channels_last": channels_last}
        run(where, tasks[world.rank], name=name, world=world, run=settings, **sections)

    run_threads(num_ranks, on_rank, timeout_s=300)
    weight = tasks[0].model[2].weight
    assert weight.is_contiguous(memory_format=torch.channels_last) == channels_last
    return [parameter.detach() for parameter in tasks[0].model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "sections", [{}, {"parallel": {"shard": "optimizer"}}], ids=["", "sharded optimizer"]
)
def test_channels_last_trains_the_same_and_continues_either_way(
    where: Path, num_ranks: int, sections: dict[str, Any]
) -> None:
    def steps_of(name: str, steps: int, *, channels_last: bool) -> list[torch.Tensor]:
        return trained(
            where, name, steps=steps, channels_last=channels_last, num_ranks=num_ranks, sections=sections
        )

    expected = steps_of("without", 20, channels_last=False)
    found = [steps_of("with", 20, channels_last=True)]
    for before, after in ((False, True), (True, False)):
        steps_of(f"from {before}", 10, channels_last=before)
        found.append(steps_of(f"from {before}", 20, channels_last=after))
    for parameters in found:
        for one, other in zip(parameters, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
