"""Tasks that go wrong, for the fault tests."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import socket
import time
from pathlib import Path

import torch

from hpctrain.launch import identify
from hpctrain.tasks.digits import Digits
from hpctrain.train import Fields


class OneRankSleeps(Digits):
    """Rank 1 goes to sleep in its fifth step and never comes to the reduction."""

    steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self.steps += 1
        if self.steps == 5 and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            time.sleep(3600)
        return super().loss(model, fields)


class Sleeps(Digits):
    """Goes to sleep in its fifth step."""

    steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self.steps += 1
        if self.steps == 5:
            time.sleep(3600)
        return super().loss(model, fields)


class NotANumber(Digits):
    """The loss is NaN from the fifth step on."""

    steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self.steps += 1
        return super().loss(model, fields) * (float("nan") if self.steps >= 5 else 1.0)


class Spoilt(Digits):
    """The loss of some ranks is multiplied in some steps of a start, as damaged samples would do.

    spoilt: for each time: the rank, the first and the last step, counted from 1 without repeats, and the factor.
    """

    def __init__(self, *, spoilt: list[tuple[int, int, int, str]], width: int = 4) -> None:
        super().__init__(width=width)
        rank = identify(os.environ, socket.gethostname()).rank
        self._spoilt = [
            (first, last, float(factor)) for of_rank, first, last, factor in spoilt if of_rank == rank
        ]
        self._steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self._steps += 1
        factors = [factor for first, last, factor in self._spoilt if first <= self._steps <= last]
        return super().loss(model, fields) * math.prod(factors)


class Slow(Digits):
    """A step takes a while, so that there is a middle of training to fail in."""

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        time.sleep(0.02)
        return super().loss(model, fields)


class Hungry(Digits):
    """Keeps 8 MB for backward of each 128 samples and layer: by far the most memory of its rank."""

    LAYERS, COPIES = 24, 256

    def build_model(self) -> torch.nn.Module:
        return Stretched(num_layers=self.LAYERS, num_copies=self.COPIES)


class HungryOnARankWithLittle(Hungry):
    """Rank 1 may have `room` bytes more than it has mapped when its model is made, which depends on torch's build."""

    def __init__(self, *, room: int, width: int = 32) -> None:
        super().__init__(width=width)
        if identify(os.environ, socket.gethostname()).rank == 1:
            mapped = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert mapped is not None
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (int(mapped[1]) * 1024 + room, hard))


class Stretched(torch.nn.Module):
    """Many layers without any products of matrices: much memory, little time."""

    def __init__(self, *, num_layers: int, num_copies: int) -> None:
        super().__init__()
        self.num_copies = num_copies
        self.scales = torch.nn.ParameterList(torch.ones(64 * num_copies) for _ in range(num_layers))
        self.last = torch.nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        values = image.flatten(1).repeat(1, self.num_copies)  # (samples, 64 * num_copies)
        for scale in self.scales:
            values = torch.tanh(values * scale)
        return self.last(values.view(len(image), self.num_copies, 64).mean(1))


class SamplesWrittenDown(Digits):
    """Each step takes a while, and writes down the ids of its samples in the folder that SEEN names."""

    def __init__(self, *, width: int = 32, step_s: float = 0.02) -> None:
        super().__init__(width=width)
        self._step_s = step_s
        path = Path(os.environ["SEEN"], f"{os.uname().nodename}-{os.getpid()}")
        self._seen = path.open("a", buffering=1)

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        time.sleep(self._step_s)
        self._seen.write(" ".join(map(str, fields["id"].tolist())) + "\n")
        return super().loss(model, fields)


class OneRankIsLate(Digits):
    """Rank 1 does not come out of step 60 by itself, or only after `seconds`; the other steps are short.

    how: `sleep`, `stop` (SIGSTOP of its own process) or `compute`. Writes when that began into the file `late`.
    """

    def __init__(self, *, how: str, seconds: float = 3600.0, width: int = 4) -> None:
        super().__init__(width=width)
        self._how, self._seconds = how, seconds
        self._steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self._steps += 1
        time.sleep(0.01)
        if self._steps == 60 and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            Path("late").write_text(str(time.time()))
            self.be_late()
        return super().loss(model, fields)

    def be_late(self) -> None:
        until_s = time.monotonic() + self._seconds
        if self._how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while time.monotonic() < until_s:
            if self._how == "sleep":
                time.sleep(max(0.0, until_s - time.monotonic()))
