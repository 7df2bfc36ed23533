"""The user's task on one rank: forward and backward over a batch, and metrics. Does not communicate by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch

from hpctrain.data import Batch
from hpctrain.reduce import Updater
from hpctrain.train.task.sync_batch_norm import communicates_in_forward
from hpctrain.train.task.task import Task, takes_valid


@final
class TaskRunner:
    """`Runner` of a task with its whole model.

    dtype: the floating-point fields of a batch are given to the task in it; None: as they are stored. autocast: makes
    the context in which forward runs. counts_samples: False on ranks whose samples another rank counts, because both
    hold parts of the same layers.
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
    ) -> None:
        self.task = task
        self.model = model
        self.device = device
        self.counts_samples = counts_samples
        self._dtype = dtype
        self._autocast = autocast
        self._takes_valid = takes_valid(task)
        # If forward is collective, a rank without samples takes part with an empty batch of weight 0.
        self._takes_empty = communicates_in_forward(model)

    @property
    def communicates(self) -> bool:
        """True if forward is collective, as with batch normalisation over the ranks."""
        return self._takes_empty

    def forward_backward(self, batch: Batch, updater: Updater, *, micro_batches: int = 1) -> float:
        """Computes the gradients of this rank's share of a batch, in `micro_batches` parts.

        Returns the loss of the share times its weight, or 0 if another rank counts the samples; over all ranks these
        add up to the mean loss of the batch.
        """
        with self._device_timed():
            loss = self._forward_backward(batch, updater, micro_batches=micro_batches)
        return loss if self.counts_samples else 0.0

    def _forward_backward(self, batch: Batch, updater: Updater, *, micro_batches: int) -> float:
        losses = []
        parts = [p for p in batch.split(micro_batches) if p.num_samples > 0 or self._takes_empty]
        for number, part in enumerate(parts, start=1):
            loss = self.loss(part)
            updater.backward(loss, weight=part.weight, last=number == len(parts))
            if part.num_samples > 0:  # the mean over no samples is NaN
                losses.append(loss.detach().double() * part.weight)
        return float(torch.stack(losses).sum()) if losses else 0.0  # one device synchronisation for all parts

    @contextmanager
    def _device_timed(self) -> Iterator[None]:
        """Sets `device_s` from events before and after the work that the `with` block puts on the GPU's stream."""
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
        """Returns the mean loss over the samples of a micro-batch, shape (), with its graph."""
        with self._autocast():
            return self._loss(part.to(self.device, dtype=self._dtype))

    def _loss(self, part: Batch) -> torch.Tensor:
        """Returns the mean loss over the valid samples; a task that takes `valid` leaves out the padding itself."""
        if self._takes_valid:
            return self.task.loss(self.model, part.fields, valid=part.valid)  # type: ignore[call-arg]
        return self.task.loss(self.model, part.real().fields)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Returns the means of the task's metrics over this rank's samples, at least one."""
        with self._autocast():
            return self.task.metrics(self.model, batch.real().to(self.device, dtype=self._dtype).fields)
