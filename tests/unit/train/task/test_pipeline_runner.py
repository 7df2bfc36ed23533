"""What the ranks of a pipeline give it: inputs of one shape, whatever samples there are."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data import Batch
from hpctrain.errors import UsageError
from hpctrain.train.task.pipeline_runner import PipelineRunner
from hpctrain.train.task.task import Fields

ROWS = 2


class Recorded:
    """In place of a pipeline of one stage, which returns its inputs: what it was given."""

    bubbles = ()

    def __init__(self, *, has_first: bool = True, has_last: bool = True) -> None:
        self.has_first, self.has_last = has_first, has_last
        self.given: list[torch.Tensor] = []

    def compute_in(self, context: Callable[[], Any]) -> None:
        assert context is nullcontext

    def forward_backward(
        self, inputs: torch.Tensor, loss_of: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> None:
        self.given.append(inputs)
        if self.has_last:
            for number, output in enumerate(inputs.view(-1, ROWS, *inputs.shape[1:])):
                loss_of(output, number)

    def forward(self, inputs: torch.Tensor, *, parts: int) -> torch.Tensor | None:
        assert len(inputs) == parts * ROWS
        self.given.append(inputs)
        return inputs if self.has_last else None


class Noisy:
    """Draws random numbers, and counts on at least one sample. longest: leaves of each sample so many places."""

    def __init__(self, *, longest: Callable[[Fields], int] = lambda fields: 3) -> None:
        self._longest = longest

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        fields["x"].amin()
        torch.rand(1), np.random.rand(), random.random()
        output: torch.Tensor = model(fields["x"][:, : self._longest(fields)])
        return output.mean()

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {"mean": float(self.loss(model, fields))}


def batch_of(samples: int) -> Batch:
    x = torch.arange(1.0, samples + 1).view(-1, 1).expand(samples, 3)
    return Batch(fields={"x": x}, epoch=0, start=0, num_samples=samples, global_samples=6)


def runner_over(pipeline: Recorded, task: Noisy | None = None) -> PipelineRunner:
    task = task or Noisy()
    return PipelineRunner(
        task, task.build_model(), pipeline=pipeline, rows=ROWS,  # type: ignore[arg-type]
        scaled=lambda loss, weight: loss * weight, device=torch.device("cpu"),
    )  # fmt: skip


def test_micro_batches_without_samples_get_rows_of_others_and_no_loss() -> None:
    pipeline = Recorded()
    runner = runner_over(pipeline)
    assert runner.forward_backward(batch_of(1), None, micro_batches=3) == pytest.approx(1 / 6)  # type: ignore[arg-type]
    assert runner.forward_backward(batch_of(4), None, micro_batches=3) == pytest.approx(10 / 6)  # type: ignore[arg-type]
    assert [inputs[:, 0].tolist() for inputs in pipeline.given] == [[1.0] * 6, [1, 2, 3, 3, 4, 4]]


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_without_samples_has_the_shape_of_the_last_one(first: bool) -> None:
    pipeline = Recorded()
    runner = runner_over(pipeline, Noisy(longest=lambda fields: 2))
    if not first:
        runner.forward_backward(batch_of(6), None, micro_batches=3)  # type: ignore[arg-type]
    assert runner.forward_backward(batch_of(0), None, micro_batches=3) == 0.0  # type: ignore[arg-type]
    assert torch.equal(pipeline.given[-1], torch.zeros(6, 2))


def test_other_ranks_know_the_shape_and_draw_no_random_numbers() -> None:
    pipeline = Recorded(has_first=False, has_last=False)
    runner = runner_over(pipeline)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    runner.forward_backward(batch_of(5), None, micro_batches=3)  # type: ignore[arg-type]
    runner.metrics(batch_of(3))
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    assert [(inputs.shape, inputs.is_meta) for inputs in pipeline.given] == [((6, 3), True), ((4, 3), True)]


@pytest.mark.parametrize("has_first", [True, False])
def test_micro_batches_of_different_shapes_are_refused_on_all_ranks_of_a_pipeline(has_first: bool) -> None:
    runner = runner_over(
        Recorded(has_first=has_first), Noisy(longest=lambda fields: 1 + int(fields["x"].max()) % 2)
    )
    with pytest.raises(
        UsageError, match=r"shape \[[12]\] per sample in one micro-batch .* so pad the samples"
    ):
        runner.forward_backward(batch_of(3), None, micro_batches=3)  # type: ignore[arg-type]
