"""The task of the runs whose memory is measured: digits, held after a number of steps."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

from hpctrain.tasks.digits import Digits
from hpctrain.train import Fields

# The variable's value: a folder. Each rank makes a file in it whose name is its process id, and waits for GO.
FOLDER_VARIABLE = "BENCHMARK_START_FOLDER"
STEPS_VARIABLE = "BENCHMARK_START_STEPS"
GO = "go"
_WAITS_S = 300.0


class Held(Digits):
    """Waits in the forward pass of the step after as many as $BENCHMARK_START_STEPS."""

    def __init__(self) -> None:
        super().__init__()
        self._steps_left = int(os.environ[STEPS_VARIABLE])
        self._folder = Path(os.environ[FOLDER_VARIABLE])

    def loss(self, model: nn.Module, fields: Fields) -> torch.Tensor:
        if torch.is_grad_enabled():
            if self._steps_left == 0:
                self._hold()
            self._steps_left -= 1
        return super().loss(model, fields)

    def _hold(self) -> None:
        (self._folder / str(os.getpid())).touch()
        until_s = time.monotonic() + _WAITS_S
        while not (self._folder / GO).exists() and time.monotonic() < until_s:
            time.sleep(0.02)
