"""A small task, and runs of it on the dataset of the fixture `where`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import functional

from hpctrain.comm import World
from hpctrain.resilience import CheckpointSignal, StopRequest
from hpctrain.train.task.task import Task as TrainTask
from tests.sessions import carried_out

SAMPLES = 100


class Stoppable(TrainTask, Protocol):
    """A task whose run is stopped by `stop`."""

    stop: StopRequest


class Task:
    """Logistic regression on digits. Counts its steps; may ask for a stop, fail in evaluation, or diverge."""

    def __init__(self, *, stop_after: int = 0, fail_in_metrics: bool = False, nan: bool = False) -> None:
        self.stop = StopRequest()
        self.stop_after = stop_after
        self.fail_in_metrics = fail_in_metrics
        self.nan = nan
        self.steps = 0
        self.seen: list[int] = []
        self.precisions: set[torch.dtype] = set()

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        # Ranks that are threads share torch's generator: one may seed it while another draws.
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter, -0.125, 0.125, generator=generator)
        return model

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> torch.Tensor:
        self.steps += 1
        self.seen += fields["id"].tolist()
        if self.steps == self.stop_after:
            self.stop.request("test")
        logits = model(fields["image"])
        self.precisions.add(logits.dtype)
        return functional.cross_entropy(logits.float(), fields["label"]) * (float("nan") if self.nan else 1)

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> dict[str, float]:
        if self.fail_in_metrics:
            raise KeyError("a bug in the metrics")
        return {"accuracy": float((model(fields["image"]).argmax(1) == fields["label"]).double().mean())}


def run(
    where: Path,
    task: Stoppable,
    *,
    name: str = "run",
    resume: str = "auto",
    world: World | None = None,
    nodes: Sequence[str] | None = None,
    save_signal: CheckpointSignal | None = None,
    **sections: dict[str, Any],
) -> dict[str, Any]:
    document: dict[str, dict[str, Any]] = {
        "run": {"directory": str(where / name), "steps": 10},
        "task": {"target": "tests:Task"},
        "data": {"train": str(where / "data"), "held_out": str(where / "data"), "global_batch": 20},
        "optimizer": {"name": "adamw", "lr": 0.01},
    }
    for section, values in sections.items():
        document[section] = {**document.get(section, {}), **values}
    document["run"] = {k: v for k, v in document["run"].items() if v is not None}
    return carried_out(
        document, task, world=world, nodes=nodes, stop=task.stop, resume=resume, save_signal=save_signal
    )
