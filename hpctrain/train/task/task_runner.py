"""Computes batches of the user's task on one rank. Defines `Runner`, the interface that the training loop uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, final

import torch

from hpctrain.comm import Collective
from hpctrain.data import Batch
from hpctrain.reduce import DistributedOptimizer
from hpctrain.resilience import shortage
from hpctrain.train.task.loss_weights import (
    LossWeights,
    OutputsOf,
    loss_and_weight,
    metrics_and_weight,
)
from hpctrain.train.task.sync_batch_norm import SyncBatchNorm, communicates_in_forward
from hpctrain.train.task.task import Task, takes_valid

# A sample of zeros, for ranks that must compute although they have no samples.


def row_of_zeros(batch: Batch) -> Batch:
    """Returns a batch with one sample of zeros. Sample shapes and dtypes are those of the fields of `batch`."""
    fields = {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.fields.items()}
    return replace(batch, fields=fields, num_samples=1, num_padded=0, indices=None)


# The user's task on one rank: forward and backward over a batch, and metrics. Does not communicate by
# itself.


def _weighted_sum(losses: Sequence[tuple[torch.Tensor, float]]) -> float:
    """Returns the sum of losses, each of shape () and times its weight, in float64. Waits for the device once."""
    if len(losses) == 1:
        [(loss, weight)] = losses
        return loss.item() * weight
    return float(torch.stack([loss.double() * weight for loss, weight in losses]).sum()) if losses else 0.0


@final
class TaskRunner:
    """A `Runner` of a task without a pipeline: the model is whole on each rank, sharded, or its layers are split.

    Args:
        dtype: The dtype to which the floating-point fields of a batch are converted; None: they keep their dtypes.
        autocast: A function that creates the context in which forward runs.
        counts_samples: False on a rank whose samples another rank counts, because both hold parts of the same layers.
        comm: The communicator of all ranks; None: there is one rank.
        loss_unit: The number by which an earlier start of this run divided the task's weights; see `unit` of
            `LossWeights`.
        units_every_step: True to choose this number in each step; see `every_step` of `LossWeights`.
    """

    device_s = 0.0
    bubbles: Sequence[tuple[float, float]] = ()

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        counts_samples: bool = True,
        comm: Collective | None = None,
        loss_unit: float | None = None,
        units_every_step: bool = False,
    ) -> None:
        self.task = task
        self.model = model
        self.device = device
        self.counts_samples = counts_samples
        self.weights = LossWeights(
            task, comm=comm, counts=counts_samples, unit=loss_unit, every_step=units_every_step
        )
        self._dtype = dtype
        self._autocast = autocast
        self._takes_valid = takes_valid(task)
        self._communicates = communicates_in_forward(model)
        # Statistics over the ranks would count samples again.
        self._takes_empty = any(isinstance(module, SyncBatchNorm) for module in model.modules())
        self._computed: Batch | None = None

    @property
    def communicates(self) -> bool:
        """True if forward is collective, as with batch normalisation over the ranks."""
        return self._communicates

    def forward_backward(
        self, batch: Batch, updater: DistributedOptimizer, *, micro_batches: int = 1
    ) -> float:
        """Computes the gradients of a batch; see `Runner.forward_backward`."""
        self.weights.begin_step()
        try:
            with self._device_timed():
                loss = self._forward_backward(batch, updater, micro_batches=micro_batches)
        except (RuntimeError, MemoryError) as error:
            if shortage(error) is not None and not self._communicates:
                self.weights.end_step()  # the other ranks wait for this one there
            raise
        self.weights.end_step()
        return loss if self.counts_samples else 0.0

    def _forward_backward(self, batch: Batch, updater: DistributedOptimizer, *, micro_batches: int) -> float:
        losses = []
        parts = [p for p in batch.split(micro_batches) if p.num_samples > 0 or self._communicates]
        self.weights.agree_before(part.to(self.device, dtype=self._dtype) for part in parts)
        if self._communicates and not self._takes_empty:
            self._computed = next((p for p in parts if p.num_samples > 0), self._computed)
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            if part.num_samples > 0:
                loss, weight = self._backward(part, updater, last=last)
                if loss is not None:
                    losses.append((loss.detach(), weight))
            else:
                self._take_part(part, updater, last=last)
        return _weighted_sum(losses)

    def _backward(
        self, part: Batch, updater: DistributedOptimizer, *, last: bool
    ) -> tuple[torch.Tensor | None, float]:
        """Runs forward and backward of a micro-batch with samples.

        Returns the loss and its weight; the loss is None if the weight is 0.
        """
        outputs = OutputsOf(self.model)
        with self._autocast():
            of_part = part.to(self.device, dtype=self._dtype)
            with outputs.kept() if self._communicates and self.weights.may_be_given else nullcontext():
                returned = self._loss(of_part)
            loss, weight = self.weights.weigh(returned, of_part)
        if weight > 0:
            updater.backward(loss, weight=weight, last=last)
            return loss, weight
        # A mean over no values, usually NaN. Backward must run only if it is collective.
        if self._communicates:
            updater.backward(outputs.zero(loss), weight=0.0, last=last)
        return None, 0.0

    def _take_part(self, part: Batch, updater: DistributedOptimizer, *, last: bool) -> None:
        """Runs forward and backward with weight 0 for a micro-batch without samples, since they are collective.

        It uses samples of an earlier micro-batch, or zeros: a mean over no samples would be NaN, and so would its
        gradient. Running statistics, other buffers and random generators are restored afterwards. A model with
        batch normalisation over the ranks gets the empty micro-batch instead.
        """
        if self._takes_empty:
            self._backward_of_nothing(part, updater, last=last)
            return
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        again = self._computed if self._computed is not None else row_of_zeros(part)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self._backward_of_nothing(again, updater, last=last)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def _backward_of_nothing(self, part: Batch, updater: DistributedOptimizer, *, last: bool) -> None:
        outputs = OutputsOf(self.model)
        with outputs.kept() if self.weights.may_be_given else nullcontext():
            loss = self.loss(part)
        self.weights.end_step()  # in the first step other ranks wait after their first forward
        if self.weights.total is not None:
            loss = outputs.zero(loss)
        updater.backward(loss, weight=0.0, last=last)

    @contextmanager
    def _device_timed(self) -> Iterator[None]:
        """Sets `device_s` to the seconds that a GPU needs for the `with` block, measured with events on its stream."""
        if self.device.type != "cuda":
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self.device))
        yield
        end.record(torch.cuda.current_stream(self.device))
        end.synchronize()
        self.device_s = begin.elapsed_time(end) / 1e3

    def loss(self, part: Batch) -> torch.Tensor:
        """Returns the mean loss of a micro-batch, shape (), with the autograd graph. The loss is not weighted."""
        with self._autocast():
            return loss_and_weight(self._loss(part.to(self.device, dtype=self._dtype)))[0]

    def weighed_loss(self, part: Batch) -> tuple[torch.Tensor, float | None]:
        """Returns the mean loss of a micro-batch, shape (), with its autograd graph, and the weight from the task.

        The weight is None if the task gives no weights.
        """
        with self._autocast():
            moved = part.to(self.device, dtype=self._dtype)
            loss, weight = loss_and_weight(self._loss(moved))
            if weight is None and self.weights.has_method:
                weight = self.weights.of_fields(moved)
            return loss, weight

    def _loss(self, part: Batch) -> Any:
        """Returns the result of the task's `loss`. Padding is passed only to a `loss` with the parameter `valid`."""
        if self._takes_valid:
            return self.task.loss(self.model, part.fields, valid=part.valid)  # type: ignore[call-arg]
        return self.task.loss(self.model, part.real().fields)

    def metrics(self, batch: Batch) -> tuple[Mapping[str, float], float | None]:
        """Returns the means of the task's metrics over the samples of the batch, and their weight.

        See `Runner.metrics`.
        """
        real = batch.real().to(self.device, dtype=self._dtype)
        with self._autocast():
            return metrics_and_weight(
                self.task.metrics(self.model, real.fields), weights=self.weights, part=real
            )


# `Runner`, the interface between the training loop and what computes a batch.


class Runner(Protocol):
    """Computes batches of a task on one rank, with the model or with this rank's stages of the model.

    Attributes:
        device_s: The seconds that a GPU needed for the last `forward_backward`.
        communicates: True if forward is collective.
        counts_samples: False on a rank whose samples another rank counts, because both hold parts of one copy of the
            model.
        weights: The weights of the losses.
        bubbles: The intervals of the last `forward_backward` in which this rank's pipeline stages waited for other
            stages: start and end of each, by `time.perf_counter`. Empty without a pipeline.
    """

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def device_s(self) -> float: ...
    @property
    def communicates(self) -> bool: ...
    @property
    def bubbles(self) -> Sequence[tuple[float, float]]: ...
    @property
    def counts_samples(self) -> bool: ...
    @property
    def weights(self) -> LossWeights: ...

    def forward_backward(
        self, batch: Batch, updater: DistributedOptimizer, *, micro_batches: int = 1
    ) -> float:
        """Computes the gradients of this rank's share of a batch, in `micro_batches` parts.

        Returns the loss of the share times its weight, or 0 if another rank counts the samples. The sum of these
        numbers over all ranks is the mean loss of the batch. If the task gives weights, this sum is the mean loss times
        the sum of `weights.total` over the ranks. Collective over the world in the first step, in which the ranks
        exchange whether the task gives weights.
        """

    def metrics(self, batch: Batch) -> tuple[Mapping[str, float], float | None] | None:
        """Returns the means of the task's metrics over the samples of the batch, and the weight of these means.

        The batch must have at least one sample. The weight is None if the means are to be weighted by the number of
        samples. Returns None if another rank counts the samples.
        """
