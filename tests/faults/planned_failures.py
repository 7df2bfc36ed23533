"""Tasks that fail for real: differently at each attempt of `hpctrain supervise`, or in several ways in one run."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import torch

from hpctrain.launch import identify
from hpctrain.tasks.digits import Digits
from hpctrain.train import Fields

VICTIM = 1  # the rank that fails


class FailsAsPlanned(Digits):
    """Trains slowly. plan: what the victim does at each attempt, separated by commas; after the last it trains to the
    end.

    at: number of the step of an attempt in which it does that. step_s: what a step takes at least.
    """

    def __init__(self, *, plan: str = "", at: int = 8, step_s: float = 0.02, width: int = 4) -> None:
        super().__init__(width=width)
        number = int(os.environ["HPCTRAIN_ATTEMPT"])
        kinds = plan.split(",")
        self._kind = kinds[number - 1] if number <= len(kinds) else ""
        self._rank = identify(os.environ, socket.gethostname()).rank
        self._at, self._step_s = at, step_s
        self._steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        time.sleep(self._step_s)
        if model.training:
            self._steps += 1
            if self._steps == self._at and (self._rank == VICTIM or self._kind == "all raise"):
                self._fail(model)
        return super().loss(model, fields)

    def _fail(self, model: torch.nn.Module) -> None:
        if self._kind in ("raise", "all raise"):
            raise ZeroDivisionError(f"a bug of the user's at step {self._steps}, at {id(self):#x}")
        if self._kind == "raise another":
            raise KeyError("label")
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._kind == "exit":
            os._exit(17)
        if self._kind == "memory":
            torch.empty(1 << 46, dtype=torch.uint8)  # 64 TiB, more than the kernel lends to anybody
        if self._kind == "disk":
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"x")
        if self._kind == "replicas":
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
        if self._kind == "data":
            for path in Path("data/digits/train").glob("*.h5"):
                with path.open("r+b") as file:  # in place: the other ranks have mapped it
                    file.seek(path.stat().st_size // 2)
                    file.write(b"rotten")


class FailsInOneRun(Digits):
    """The victim's failures in one run, each given by the number of a call of its loss in training; 0: never.

    short_at: it asks for more memory than there is. nan_from: its loss is not a number from this call on. stop_at: its
    process is stopped by SIGSTOP.
    """

    def __init__(self, *, short_at: int = 0, nan_from: int = 0, stop_at: int = 0) -> None:
        super().__init__(width=4)
        self._is_victim = identify(os.environ, socket.gethostname()).rank == VICTIM
        self._short_at, self._nan_from, self._stop_at = short_at, nan_from, stop_at
        self._calls = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        found = super().loss(model, fields)
        if not model.training or not self._is_victim:
            return found
        self._calls += 1
        if self._calls == self._short_at:
            torch.empty(1 << 46, dtype=torch.uint8)  # 64 TiB
        if self._calls == self._stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return found * float("nan") if 0 < self._nan_from <= self._calls else found
