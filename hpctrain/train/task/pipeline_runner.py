"""The user's task on one rank of a pipeline: forward and backward of its stages, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from hpctrain.data import Batch
from hpctrain.distributed import Pipeline
from hpctrain.errors import UsageError
from hpctrain.reduce import Updater
from hpctrain.train.task.task import Task, takes_valid


@final
class PipelineRunner:
    """`Runner` of a task whose model is in stages. All methods are collective over the ranks of a pipeline.

    They have the same batches. rows: samples of a micro-batch; one with fewer is padded, and the loss is of its samples
    alone, so that the shapes between stages stay. scaled: weights a loss, as `ShardedUpdater.scaled` does. dtype,
    autocast, counts_samples: as for `TaskRunner`; only ranks with the last stage, which has the loss, count samples.
    The task's `loss` and `metrics` must call their model once, with one tensor.
    """

    device_s = 0.0
    communicates = True

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        *,
        pipeline: Pipeline,
        rows: int,
        scaled: Callable[..., torch.Tensor],
        device: torch.device,
        dtype: torch.dtype | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        counts_samples: bool = True,
    ) -> None:
        self.task = task
        self.model = model
        self.device = device
        self.counts_samples = counts_samples and pipeline.has_last
        self._pipeline = pipeline
        self._rows = rows
        self._scaled = scaled
        self._dtype = dtype
        self._autocast = autocast
        self._takes_valid = takes_valid(task)
        pipeline.compute_in(autocast)

    @property
    def bubbles(self) -> Sequence[tuple[float, float]]:
        """See `Runner.bubbles`: whenever this rank's stages did not compute."""
        return self._pipeline.bubbles

    def forward_backward(self, batch: Batch, updater: Updater, *, micro_batches: int = 1) -> float:
        """See `Runner.forward_backward`. updater: not called; the schedule runs backward."""
        parts = [part.to(self.device, dtype=self._dtype) for part in batch.real().split(micro_batches)]
        losses: list[torch.Tensor] = []

        def loss_of(output: torch.Tensor, number: int) -> torch.Tensor:
            part = parts[number]
            if part.num_samples == 0:
                return output[:0].sum()
            with self._autocast():
                loss = self._loss(_Given(output[: part.num_samples]), part)
            losses.append(loss.detach().double() * part.weight)
            return self._scaled(loss, weight=part.weight)

        inputs = torch.cat([self._inputs(part) for part in parts]) if self._pipeline.has_first else None
        self._pipeline.forward_backward(inputs, loss_of)
        return float(torch.stack(losses).sum()) if losses and self.counts_samples else 0.0

    def metrics(self, batch: Batch) -> dict[str, float] | None:
        """See `Runner.metrics`: None except on ranks with the last stage."""
        real = batch.real().to(self.device, dtype=self._dtype)
        parts = -(-real.num_samples // self._rows)
        inputs = self._inputs(real, rows=parts * self._rows) if self._pipeline.has_first else None
        output = self._pipeline.forward(inputs, parts=parts)
        if output is None:
            return None
        with self._autocast():
            return self.task.metrics(_Given(output[: real.num_samples]), real.fields)

    def _loss(self, model: torch.nn.Module, part: Batch) -> torch.Tensor:
        if self._takes_valid:
            return self.task.loss(model, part.fields, valid=part.valid)  # type: ignore[call-arg]
        return self.task.loss(model, part.fields)

    def _inputs(self, part: Batch, *, rows: int | None = None) -> torch.Tensor:
        """Returns what the task gives its model, with its last row repeated up to `rows` rows.

        rows: None: those of a micro-batch.
        """
        asked = _Asked()
        try:
            self._loss(asked, part)
        except _InputsFound as found:
            inputs = found.inputs
        else:
            raise UsageError("the task's loss has not called its model, which a pipeline gives the batch")
        if len(inputs) != part.num_samples:
            raise UsageError(
                f"the task's loss calls its model with a tensor of shape {list(inputs.shape)} for {part.num_samples} "
                "samples: in a pipeline they lie along dimension 0"
            )
        missing = (self._rows if rows is None else rows) - len(inputs)
        filling = inputs[-1:] if len(inputs) else inputs.new_zeros((1, *inputs.shape[1:]))
        return torch.cat([inputs, *[filling] * missing])


class _InputsFound(Exception):  # ends the task's loss once its inputs are known
    def __init__(self, inputs: torch.Tensor) -> None:
        super().__init__()
        self.inputs = inputs


class _Asked(torch.nn.Module):
    """In place of the model, on the rank with the first stage: for what the task calls it with."""

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        if options or len(arguments) != 1 or not isinstance(arguments[0], torch.Tensor):
            raise UsageError("in a pipeline the task calls its model with one tensor: model(inputs)")
        raise _InputsFound(arguments[0])


class _Given(torch.nn.Module):
    """In place of the model, on the rank with the last stage: the pipeline's output."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output: torch.Tensor | None = output

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        if self._output is None:
            raise UsageError("in a pipeline the task's loss and metrics call their model once")
        output, self._output = self._output, None
        return output
