"""A weight that is no weight, in a later step or evaluation: the message names the step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.errors import UsageError
from tests.unit.run.training_cases import Task, run


class Weighed(Task):
    """Gives `wrong` as a weight of its losses from step `at` on, or of its metrics from the evaluation `at` on."""

    def __init__(self, wrong: Any, *, at: int, of: str) -> None:
        super().__init__()
        self.wrong, self.at, self.of = wrong, at, of
        self.evaluations = 0

    def loss(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> Any:
        loss = super().loss(model, fields)
        return loss, self.wrong if self.of == "loss" and self.steps >= self.at else len(fields["id"])

    def metrics(self, model: torch.nn.Module, fields: dict[str, torch.Tensor]) -> Any:
        self.evaluations += 1
        found = super().metrics(model, fields)
        return found, self.wrong if self.of == "metrics" and self.evaluations >= self.at else len(
            fields["id"]
        )


@pytest.mark.parametrize(
    ("wrong", "of", "at", "words"),
    [
        (math.nan, "loss", 3, r"^step 3: the task's loss gave the weight nan: give a finite number"),
        (-1, "loss", 2, r"^step 2: the task's loss gave the weight -1"),
        (torch.tensor(math.inf), "loss", 4, r"^step 4: the task's loss gave the weight inf"),
        (None, "loss", 5, r"^step 5: the task's loss gave the weight None: give a number"),
        (math.nan, "metrics", 1, r"^the evaluation after step 4: the task's metrics gave the weight nan"),
    ],
)
def test_a_wrong_weight_is_reported_with_its_step(
    where: Path, wrong: Any, of: str, at: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        run(where, Weighed(wrong, at=at, of=of), telemetry={"evaluate_every_steps": 4})


@pytest.mark.parametrize("right", [2, True + 1, torch.tensor(3.0, requires_grad=True), torch.tensor(2)])
def test_numbers_of_any_type_are_weights(where: Path, right: Any) -> None:
    assert run(where, Weighed(right, at=2, of="loss"))["status"] == "finished"
