"""A task whose steps sleep, and take longer by a known time: by input, on one rank, or on the ranks in turn."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.train import Fields
from tests.straggler_tasks import Scaled

COMPUTE_S = 0.06
# Added in the steps of each phase.
INPUT_S, RANK_S, ALTERNATING_S, EVALUATION_S = 0.04, 0.05, 0.05, 0.2
PHASE = 40
BASE, INPUT, RANK, ALTERNATING = (range(n * PHASE + 2, (n + 1) * PHASE + 1) for n in range(4))
STEPS = 4 * PHASE
SLOW_RANK = 1


def _rank() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def _num_ranks() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


class Phases:
    """Each phase has PHASE steps; its first one is not in the ranges above, as ranks change over in it."""

    _step = 0

    def build_model(self) -> torch.nn.Module:
        return Scaled(1000)

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self._step += 1
        added_s = 0.0
        if self._step in RANK and _rank() == SLOW_RANK:
            added_s = RANK_S
        if self._step in ALTERNATING and self._step % _num_ranks() == _rank():
            added_s = ALTERNATING_S
        time.sleep(COMPUTE_S + added_s)
        return model(fields["x"]).square().mean()

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        time.sleep(EVALUATION_S)
        return {"mean": float(fields["x"].mean())}


_batches = 0


def reads_slowly(arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """A transform that takes INPUT_S for the batches of that phase. It must run within the step, not ahead of it."""
    global _batches
    _batches += 1
    if _batches in INPUT:
        time.sleep(INPUT_S)
    return arrays
