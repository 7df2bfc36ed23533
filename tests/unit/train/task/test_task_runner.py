"""What a rank without samples computes where forward is collective."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hpctrain.comm.backends.serial_world import SerialWorld
from hpctrain.data import Batch
from hpctrain.distributed.sharded_tensors import mark_sharded
from hpctrain.train import TaskRunner, convert_sync_batch_norm
from hpctrain.train.task.task import Fields


class Backwards:
    """In place of an updater: the losses of which backward ran."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float, bool]] = []

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        torch.autograd.backward(loss * weight)
        self.calls.append((float(loss.detach()), weight, last))


class Tempered:
    """The mean of the inputs, normalised, times a parameter."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
        model.register_parameter("temperature", torch.nn.Parameter(torch.ones(1)))
        return model

    def loss(self, model: torch.nn.Module, fields: Fields) -> torch.Tensor:
        self.seen.append(fields["x"].flatten().tolist())
        torch.rand(len(fields["x"]))  # as dropout does
        model.train()
        normalised = model(fields["x"]) if len(fields["x"]) != 1 else fields["x"]
        mean: torch.Tensor = normalised.square().mean()
        return (mean * model.get_parameter("temperature")).sum()

    def metrics(self, model: torch.nn.Module, fields: Fields) -> dict[str, float]:
        return {}


def batch_of(samples: int, *, of: int = 4) -> Batch:
    fields = {"x": torch.arange(1.0, samples + 1).view(-1, 1)}
    return Batch(fields=fields, epoch=0, start=0, num_samples=samples, global_samples=of)


def sharded_runner() -> tuple[TaskRunner, Tempered, Any]:
    task = Tempered()
    model = task.build_model()
    mark_sharded(model, "parameters")
    return TaskRunner(task, model, device=torch.device("cpu")), task, model


def test_samples_computed_before_are_computed_again_with_weight_0_and_leave_buffers_as_they_are() -> None:
    runner, task, model = sharded_runner()
    updater = Backwards()
    runner.forward_backward(batch_of(4), updater)  # type: ignore[arg-type]
    means, gradient = model[0].running_mean.clone(), model.temperature.grad.clone()
    assert means.item() != 0
    generator = torch.get_rng_state()
    assert runner.forward_backward(batch_of(0), updater, micro_batches=2) == 0.0  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), generator)
    assert task.seen == [[1.0, 2.0, 3.0, 4.0]] * 3
    assert [(weight, last) for _, weight, last in updater.calls] == [(1.0, True), (0.0, False), (0.0, True)]
    torch.testing.assert_close(model.temperature.grad, gradient, rtol=0, atol=0)
    torch.testing.assert_close(model[0].running_mean, means, rtol=0, atol=0)
    assert model[0].num_batches_tracked == 1


def test_a_micro_batch_without_samples_computes_those_of_another_one() -> None:
    runner, task, _ = sharded_runner()
    updater = Backwards()
    loss = runner.forward_backward(batch_of(2, of=2), updater, micro_batches=3)  # type: ignore[arg-type]
    assert len(task.seen) == 3
    assert all(task.seen)
    assert sorted(weight for _, weight, _ in updater.calls) == [0.0, 0.5, 0.5]
    assert loss == pytest.approx((1 + 4) / 2)


def test_the_first_batch_without_samples_is_one_of_zeros() -> None:
    runner, task, model = sharded_runner()
    runner.forward_backward(batch_of(0), Backwards())  # type: ignore[arg-type]
    assert task.seen == [[0.0]]
    assert model.temperature.grad.item() == 0.0


def test_statistics_over_the_ranks_count_no_samples_twice() -> None:
    task = Tempered()
    model = convert_sync_batch_norm(task.build_model(), SerialWorld())
    runner = TaskRunner(task, model, device=torch.device("cpu"))
    updater = Backwards()
    runner.forward_backward(batch_of(4), updater)  # type: ignore[arg-type]
    runner.forward_backward(batch_of(0), updater)  # type: ignore[arg-type]
    assert task.seen == [[1.0, 2.0, 3.0, 4.0], []]
    assert math.isnan(updater.calls[-1][0])
