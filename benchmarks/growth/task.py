"""The task of the measured runs: digits with a small model, and notes of when steps begin and of memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.memory import status_bytes
from hpctrain.tasks.digits import Digits
from hpctrain.train import Fields

FIRST, STEADY = 1, 40  # the steps of a process at which notes are taken
_LEVELS = {FIRST: 1, STEADY: 2}  # of MPI_Pcontrol, which mpi4py limits to 0, 1 and 2


class Noted(Digits):
    """Writes to the folder $HPCTRAIN_GROWTH: `step time resident-bytes` per line, and has MPI's counters written."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self._calls = 0

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        self._calls += 1
        if self._calls in _LEVELS:
            self._note()
        return super().loss(model, fields)

    def _note(self) -> None:
        # Here, since its import starts MPI, and benchmarks.growth reads this module outside of ranks.
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
        with (Path(os.environ["HPCTRAIN_GROWTH"]) / f"notes-{rank}").open("a") as file:
            file.write(f"{self._calls} {time.time()} {status_bytes('RssAnon')}\n")
        MPI.Pcontrol(_LEVELS[self._calls])
