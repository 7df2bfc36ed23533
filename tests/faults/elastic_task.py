"""A task that writes down which samples each rank computes in which step, for runs that shrink and grow."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import numpy as np
import torch

from hpctrain.data import pack_arrays
from hpctrain.launch import identify
from hpctrain.train import Fields

NUM_SAMPLES = 96


def pack_numbered(directory: Path) -> None:
    """Packs samples with their number as the field `number`."""
    generator = np.random.default_rng(5)
    pack_arrays(
        directory,
        {
            "x": generator.standard_normal((NUM_SAMPLES, 8)).astype(np.float32),
            "number": np.arange(NUM_SAMPLES, dtype=np.int64),
        },
    )


class WritesDownSamples:
    """A small model with dropout and batch norm.

    step_s: what each micro-batch takes at least. Each rank of each attempt appends a line for each micro-batch to
    `seen/ATTEMPT-RANK`: the samples' numbers.
    """

    def __init__(self, *, step_s: float = 0.0, dropout: float = 0.0, batch_norm: bool = False) -> None:
        rank = identify(os.environ, socket.gethostname()).rank
        attempt = int(os.environ.get("HPCTRAIN_ATTEMPT", "0"))
        self._path = Path("seen", f"{attempt}-{rank}")
        self._path.parent.mkdir(exist_ok=True)
        self._step_s, self._dropout, self._batch_norm = step_s, dropout, batch_norm

    def build_model(self) -> torch.nn.Module:
        norm = torch.nn.BatchNorm1d(16) if self._batch_norm else torch.nn.Identity()
        return torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            norm,
            torch.nn.Tanh(),
            torch.nn.Dropout(self._dropout),
            torch.nn.Linear(16, 1),
        )

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        if model.training:
            with self._path.open("a") as file:
                file.write(json.dumps(fields["number"].tolist()) + "\n")
            time.sleep(self._step_s)
        wanted = torch.sin(fields["number"].to(torch.float32))[:, None]
        return (model(fields["x"]) - wanted).square().mean()

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"loss": float(self.loss(model, fields))}


def samples_by_step(
    folder: Path, *, attempt: int, first_step: int, ranks: int, micro_batches: int
) -> dict[int, list[int]]:
    """Returns the samples that all ranks of an attempt have begun to compute, by step, from 1."""
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        lines = (folder / "seen" / f"{attempt}-{rank}").read_text().splitlines()
        for number, line in enumerate(lines):
            found.setdefault(first_step + 1 + number // micro_batches, []).extend(json.loads(line))
    return found
