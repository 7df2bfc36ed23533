"""Tasks that go wrong, for the fault tests."""

from __future__ import annotations

import os
import time

import torch

from hpctrain.tasks.digits import Digits
from hpctrain.train import Fields


class OneRankRaises(Digits):
    """Rank 1 raises in its fifth step, as a bug in a user's loss would."""

    steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self.steps += 1
        if self.steps == 5 and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            raise ZeroDivisionError("a bug in the task")
        return super().loss(model, fields)


class OneRankSleeps(Digits):
    """Rank 1 goes to sleep in its fifth step and never comes to the reduction."""

    steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self.steps += 1
        if self.steps == 5 and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            time.sleep(3600)
        return super().loss(model, fields)


class NotANumber(Digits):
    """The loss is NaN from the fifth step on."""

    steps = 0

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self.steps += 1
        return super().loss(model, fields) * (float("nan") if self.steps >= 5 else 1.0)


class Slow(Digits):
    """A step takes a while, so that there is a middle of training to fail in."""

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        time.sleep(0.02)
        return super().loss(model, fields)


class NotATask:
    """Has no methods."""
