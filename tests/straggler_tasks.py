"""A task whose steps are like those of a healthy run, and ranks of it that are slow for a while."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.train import Fields

# Width of a sample, 64 KB: what a rank reads is worth reading.
WIDTH = 1 << 14
_MATRIX = 256


class Steps:
    """Its steps multiply matrices `products` times (a millisecond each), sleep, and reduce `parameters` numbers."""

    def __init__(self, *, products: int = 0, sleep_s: float = 0.0, parameters: int = 1000) -> None:
        self._products = products
        self._sleep_s = sleep_s
        self._num_parameters = parameters
        self._matrix = torch.eye(_MATRIX)

    def build_model(self) -> torch.nn.Module:
        return Scaled(self._num_parameters)

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        time.sleep(self._sleep_s)
        return model(fields["x"]).square().mean()

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"mean_square": float(model(fields["x"]).square().mean())}


class Scaled(torch.nn.Module):
    """Parameters that are multiplied with the mean of the input: as many gradients as wanted, and no work."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((num_parameters,), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x.mean()


def _is_rank_1() -> bool:
    return os.environ.get("OMPI_COMM_WORLD_RANK") == "1"


class SlowForAWhile(Steps):
    """Rank 1 takes 40 ms longer from step 100 to step `until`.

    At the steps of `MODULES_AT` every rank writes the names of its loaded modules to `modules-STEP-RANK`: what training
    imports later, all ranks read from the shared filesystem at the same time.
    """

    MODULES_AT = (10, 530)
    _step = 0

    def __init__(self, *, until: int = 180, sleep_s: float = 0.0) -> None:
        super().__init__(sleep_s=sleep_s)
        self._until = until

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self._step += 1
        if self._step in self.MODULES_AT:
            rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
            Path(f"modules-{self._step}-{rank}").write_text("\n".join(sorted(sys.modules)))
        if _is_rank_1() and 100 <= self._step < self._until:
            time.sleep(0.04)
        return super().loss(model, fields)


class _Batches:
    """Counts the batches of this rank, and times those of a healthy run. began: seconds of the monotonic clock."""

    TIMED = range(220, 320)

    def __init__(self) -> None:
        self.count = 0
        self._began: list[float] = []

    def begin(self) -> int:
        self.count += 1
        if self.count in self.TIMED:
            self._began.append(time.monotonic())
        return self.count

    def step_s(self) -> float:
        """Returns the median time from one batch to the next. Without np.median, which imports modules."""
        times = sorted(end - begin for begin, end in itertools.pairwise(self._began))
        return times[len(times) // 2]


_batches = _Batches()


def reads_slowly_later(arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """A transform that on rank 1 takes 60 ms longer than a step for batches 320 to 400, as a slow disk would: what is
    read during the step before is no delay."""
    if 320 <= _batches.begin() < 400 and _is_rank_1():
        time.sleep(_batches.step_s() + 0.06)
    return arrays
