"""Computes the user's task on one rank of a pipeline: forward and backward of this rank's stages, and metrics."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm import Collective
from hpctrain.data import Batch
from hpctrain.distributed import Pipeline
from hpctrain.errors import UsageError
from hpctrain.reduce import DistributedOptimizer
from hpctrain.train.task.loss_weights import LossWeights, metrics_and_weight
from hpctrain.train.task.task import Task, takes_valid
from hpctrain.train.task.task_runner import row_of_zeros


@final
class PipelineRunner:
    """A `Runner` of a task whose model is divided into pipeline stages. All methods are collective over the world.

    All ranks of a pipeline have the same batches. The task's `loss` and `metrics` must call their model once, with one
    tensor. Only ranks with the last stage, which has the loss, count samples.

    Args:
        rows: The number of samples per micro-batch. A smaller micro-batch is padded, so that all micro-batches have the
            same shape; the loss covers only real samples.
        scaled: A function that multiplies a loss by its weight, as `SplitModelUpdater.scaled` does.
        dtype: The dtype to which the floating-point fields of a batch are converted; None: they keep their dtypes.
        autocast: A function that creates the context in which forward runs.
        counts_samples: False on a rank whose samples another rank counts.
        comm: The communicator of all ranks; None: there is one rank.
        loss_unit: See `unit` of `LossWeights`.
        units_every_step: See `every_step` of `LossWeights`. Used only if the task has a method `weight`: weights that
            the task's `loss` returns become known only while the schedule of the pipeline runs.
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
        comm: Collective | None = None,
        loss_unit: float | None = None,
        units_every_step: bool = False,
    ) -> None:
        self.task = task
        self.model = model
        self.device = device
        self.counts_samples = counts_samples and pipeline.has_last
        self.weights = LossWeights(
            task, comm=comm, counts=self.counts_samples, unit=loss_unit,
            every_step=units_every_step and callable(getattr(task, "weight", None)),
        )  # fmt: skip
        self._pipeline = pipeline
        self._rows = rows
        self._scaled = scaled
        self._dtype = dtype
        self._autocast = autocast
        self._takes_valid = takes_valid(task)
        self._row: tuple[torch.Size, torch.dtype] | None = None  # of the last inputs
        pipeline.compute_in(autocast)

    @property
    def bubbles(self) -> Sequence[tuple[float, float]]:
        """The intervals in which this rank's stages waited for other stages; see `Runner.bubbles`."""
        return self._pipeline.bubbles

    def forward_backward(
        self, batch: Batch, updater: DistributedOptimizer, *, micro_batches: int = 1
    ) -> float:
        """Computes a batch; see `Runner.forward_backward`.

        `updater` is not called, since the schedule runs backward.
        """
        parts = [part.to(self.device, dtype=self._dtype) for part in batch.real().split(micro_batches)]
        losses: list[torch.Tensor] = []

        def loss_of(output: torch.Tensor, number: int) -> torch.Tensor:
            part = parts[number]
            if part.num_samples == 0:
                return output[:0].sum()
            given = output[: part.num_samples]
            with self._autocast():
                returned = self._loss(_Given(given), part)
            loss, weight = self.weights.weigh(returned, part, agrees=False)
            if weight == 0:
                return (given * 0.0).sum()  # the mean over nothing may be NaN
            losses.append(loss.detach().double() * weight)
            return self._scaled(loss, weight=weight)

        self.weights.begin_step()
        self.weights.agree_before(parts)
        self._pipeline.forward_backward(self._inputs(parts), loss_of)
        self.weights.end_step()
        return float(torch.stack(losses).sum()) if losses and self.counts_samples else 0.0

    def metrics(self, batch: Batch) -> tuple[Mapping[str, float], float | None] | None:
        """Evaluates a batch; see `Runner.metrics`. Returns None on ranks without the last stage."""
        real = batch.real().to(self.device, dtype=self._dtype)
        parts = -(-real.num_samples // self._rows)
        with self._draws_as_before():
            inputs = self._joined([self._asked(real)], rows=parts * self._rows)
        output = self._pipeline.forward(inputs, parts=parts)
        if output is None:
            return None
        with self._autocast():
            found = self.task.metrics(_Given(output[: real.num_samples]), real.fields)
            return metrics_and_weight(found, weights=self.weights, part=real)

    def _loss(self, model: torch.nn.Module, part: Batch) -> Any:
        if self._takes_valid:
            return self.task.loss(model, part.fields, valid=part.valid)  # type: ignore[call-arg]
        return self.task.loss(model, part.fields)

    def _inputs(self, parts: Sequence[Batch]) -> torch.Tensor:
        """Returns the model's inputs for all micro-batches, concatenated, each padded to the same number of rows.

        Padding repeats the last row of a micro-batch. A micro-batch without samples is filled with a row of another
        micro-batch. On ranks without the first stage, the inputs are on the meta device.
        """
        with self._draws_as_before():
            found = [self._asked(part) if part.num_samples > 0 else None for part in parts]
            filling = next((inputs[-1:] for inputs in found if inputs is not None), None)
            if filling is None:
                filling = self._row_without_samples(parts[0])
        self._row = filling.shape, filling.dtype
        for inputs in found:
            if inputs is not None and (inputs.shape[1:], inputs.dtype) != (filling.shape[1:], filling.dtype):
                raise UsageError(
                    f"the task's loss calls its model with {filling.dtype} of shape {list(filling.shape[1:])} per "
                    f"sample in one micro-batch and {inputs.dtype} of shape {list(inputs.shape[1:])} in another one of "
                    "the same step: in a pipeline, dtype and shape must be equal, so pad the samples"
                )
        return self._joined([inputs if inputs is not None else filling for inputs in found], rows=self._rows)

    def _joined(self, each: Sequence[torch.Tensor], *, rows: int) -> torch.Tensor:
        """Concatenates inputs, each padded to `rows` rows by repeating its last row."""
        last = each[0][-1:]
        if not self._pipeline.has_first:
            return torch.empty((rows * len(each), *last.shape[1:]), dtype=last.dtype, device="meta")
        return torch.cat(
            [torch.cat([inputs, inputs[-1:].expand(rows - len(inputs), *last.shape[1:])]) for inputs in each]
        )

    def _row_without_samples(self, part: Batch) -> torch.Tensor:
        """Returns one row of inputs for a batch without samples. The output for this row enters no loss."""
        if self._row is None:
            return self._asked(row_of_zeros(part))
        shape, dtype = self._row
        return torch.zeros(shape, dtype=dtype, device=self.device if self._pipeline.has_first else "meta")

    def _asked(self, part: Batch) -> torch.Tensor:
        """Returns the tensor with which the task calls its model for `part`.

        On ranks without the first stage, which need only its shape, the tensor is on the meta device.
        """
        asked = _Asked()
        try:
            self._loss(asked, part)
        except _InputsFound as found:
            inputs = found.inputs
        else:
            raise UsageError(
                "the task's loss did not call its model: in a pipeline it must, since the call passes the batch to "
                "the first stage"
            )
        if inputs.shape[:1] != (part.num_samples,):
            raise UsageError(
                f"the task's loss calls its model with a tensor of shape {list(inputs.shape)} for {part.num_samples} "
                "samples: in a pipeline, the samples must lie along dimension 0"
            )
        return inputs if self._pipeline.has_first else inputs.to("meta")

    @contextmanager
    def _draws_as_before(self) -> Iterator[None]:
        """Restores the random generators after the `with` block, on ranks without the first stage.

        These ranks call the task only for the shapes of the inputs, which must not change their random numbers.
        """
        if self._pipeline.has_first:
            yield
            return
        of_numpy, of_python = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            yield
        np.random.set_state(of_numpy)
        random.setstate(of_python)


class _InputsFound(Exception):  # ends the task's loss once its inputs are known
    def __init__(self, inputs: torch.Tensor) -> None:
        super().__init__()
        self.inputs = inputs


class _Asked(torch.nn.Module):
    """Replaces the model in a call of the task's `loss`, to find the tensor with which the task calls its model."""

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        if options or len(arguments) != 1 or not isinstance(arguments[0], torch.Tensor):
            raise UsageError(
                "in a pipeline the task must call its model with exactly one tensor: model(inputs)"
            )
        raise _InputsFound(arguments[0])


class _Given(torch.nn.Module):
    """Replaces the model in calls of the task on the rank with the last stage. It returns the pipeline's output."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self._output: torch.Tensor | None = output

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        if self._output is None:
            raise UsageError(
                "the task called its model again: in a pipeline, loss and metrics must each call it once"
            )
        output, self._output = self._output, None
        return output
