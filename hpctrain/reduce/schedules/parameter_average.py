"""Averages the parameters of workers that have updated them alone.

What is sent is the change of each parameter since the newest average, in buckets, by the same reducers that sum
gradients: changes are small, so that a wire format rounds them less than it would round parameters, and error feedback
applies to them as to gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch.nn.modules.batchnorm import _NormBase

from hpctrain.comm import Collective
from hpctrain.reduce.contract.bucket_plan import plan_buckets
from hpctrain.reduce.contract.bucket_reducer import (
    LONGEST_WAIT_OVERSUBSCRIBED_S,
    LONGEST_WAIT_S,
    BucketReducer,
    Shapes,
    StateTensor,
)
from hpctrain.reduce.contract.step_end import GradientSquares
from hpctrain.reduce.contract.updater import ReductionObserver
from hpctrain.reduce.data_parallel.gradient_memory import describe_gradient, one_device, slot_view
from hpctrain.reduce.data_parallel.reduction_thread import ReductionPipeline, TimeInFlight
from hpctrain.reduce.wire_formats import find_wire

BASE = "base/"
ARRIVED = "arrived/"


@final
class ParameterAverage:
    """The newest average of the parameters, and the one that is on its way. The constructor is collective.

    On every rank the newest average has the same bits. Needs memory for two copies of the parameters: the average, and
    the buckets in which changes are sent.

    Args:
        parameters: The trained parameters; the same values on every rank, which are the first average.
        reducer: Sums buckets over all ranks; the caller closes it.
        bucket_bytes: Maximum size of a bucket.
        share: The weight of this rank's change: 1 / (number of workers x ranks of this rank's worker).
        in_background: True to reduce on a separate thread, while the caller continues.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        reducer: BucketReducer,
        bucket_bytes: int,
        share: float,
        in_background: bool,
    ) -> None:
        self._parameters = list(parameters)
        self._share = share
        self._in_background = in_background
        self._pipeline: ReductionPipeline | None = None
        self._observer: ReductionObserver | None = None
        self._base: list[torch.Tensor] = []
        self._is_in_flight = False
        self.use(reducer, bucket_bytes=bucket_bytes)
        self.begin_again()

    def use(self, reducer: BucketReducer, *, bucket_bytes: int) -> None:
        """Plans the buckets of another reducer. Collective; call it while no average is in flight."""
        self.close()
        before = {number: base.clone() for number, base in enumerate(self._base)}
        self._reducer = reducer
        # float16 has few small values; powers of two lose no bits of the others.
        wire = find_wire(reducer.wire)
        self._scale = 1.0 if wire is None or wire.loss_scale is None else wire.loss_scale
        device = one_device(self._parameters)
        specs = [describe_gradient(parameter) for parameter in self._parameters]
        self._buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)
        self._memory = reducer.plan(self._buckets, device=device)
        sent: dict[int, torch.Tensor] = {}
        kept: dict[int, torch.Tensor] = {}
        self._flat: list[tuple[torch.Tensor, torch.Tensor]] = []  # changes and average of each bucket
        for bucket, memory in zip(self._buckets, self._memory, strict=True):
            changes = memory[: bucket.num_gradients]
            average = torch.zeros_like(changes)
            self._flat.append((changes, average))
            for slot in bucket.slots:
                sent[slot.parameter] = slot_view(self._parameters[slot.parameter], slot, changes)
                kept[slot.parameter] = slot_view(self._parameters[slot.parameter], slot, average)
        self._changes = [sent[number] for number in range(len(self._parameters))]
        self._base = [kept[number] for number in range(len(self._parameters))]
        for number, base in before.items():
            self._base[number].copy_(base)
        self._squares = GradientSquares(self._buckets, self._memory)
        self._pipeline = ReductionPipeline(
            reducer.reduce, device=device, overlap=self._in_background,
            # Training continues meanwhile; polls must not take its cores.
            longest_wait_s=LONGEST_WAIT_OVERSUBSCRIBED_S if self._in_background else LONGEST_WAIT_S,
        )  # fmt: skip
        self._pipeline.observer = self._observer

    @property
    def base(self) -> Sequence[torch.Tensor]:
        """The newest average of each parameter, in the dtype of its sum; of complex parameters as real numbers."""
        return self._base

    @property
    def mean_changes(self) -> Sequence[torch.Tensor]:
        """The mean over the workers of the change of each parameter since `base`, after `finish` has returned True."""
        return self._changes

    def observe(self, observer: ReductionObserver | None) -> None:
        """See `DistributedOptimizer.observe_reductions`."""
        self._observer = observer
        if self._pipeline is not None:
            self._pipeline.observer = observer

    # ------------------------------------------------------------------ one average

    @torch.no_grad()
    def start(self) -> None:
        """Starts to sum the changes of the parameters since `base`. Collective."""
        self._reducer.begin_step(1.0)
        for parameter, change in zip(self._parameters, self._changes, strict=True):
            change.copy_(_real(parameter))
        assert self._pipeline is not None
        for number, (changes, average) in enumerate(self._flat):
            changes.sub_(average).mul_(self._share * self._scale)
            self._pipeline.submit(number)
        self._is_in_flight = True

    @torch.no_grad()
    def finish(self) -> tuple[bool, TimeInFlight]:
        """Waits until the sums are complete, if an average is in flight. Collective.

        Returns:
            True if the mean changes are finite, the same on every rank; and the times of the reductions. If the changes
                are not finite, they count as not sent.
        """
        took = TimeInFlight(0.0, 0.0)
        if self._is_in_flight:
            assert self._pipeline is not None
            took = self._pipeline.wait()
            self._is_in_flight = False
            # All ranks compute with the same bits.
            self._is_finite = 0 <= self._squares.of_all() < math.inf
            self._reducer.end_step(applied=self._is_finite, rescale=1.0)
            if not self._is_finite:
                for memory in self._memory:  # a codec that scales blocks has turned the gaps' zeros into NaN
                    memory.zero_()
            elif self._scale != 1.0:
                for changes, _ in self._flat:
                    changes.mul_(1.0 / self._scale)
        return self._is_finite, took

    @torch.no_grad()
    def add_changes(self) -> None:
        """Adds the mean changes to `base`, which is then the mean of the parameters when `start` was called."""
        for changes, average in self._flat:
            average.add_(changes)

    @torch.no_grad()
    def give(self, *, weight: float = 1.0) -> None:
        """Moves the parameters towards `base`: parameter = (1 - weight) x parameter + weight x base."""
        for parameter, base in zip(self._parameters, self._base, strict=True):
            if weight == 1.0:
                _real(parameter).copy_(base)
            else:
                _real(parameter).lerp_(base.to(_real(parameter).dtype), weight)

    @torch.no_grad()
    def begin_again(self) -> None:
        """Takes the parameters, which are the same on every rank, as the newest average. Not collective."""
        self._is_finite = True
        for parameter, base in zip(self._parameters, self._base, strict=True):
            base.copy_(_real(parameter))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In the `with` block the parameters are the newest average. Not collective."""
        own = [parameter.detach().clone() for parameter in self._parameters]
        self.give()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(self._parameters, own, strict=True):
                    parameter.copy_(before)

    # ------------------------------------------------------------------ in checkpoints

    def state(self, *, with_base: bool, with_arrived: bool) -> list[StateTensor]:
        """Returns the tensors that a checkpoint must hold. Not collective; call it after `finish`.

        Args:
            with_base: True to include `base`, if the parameters differ from it.
            with_arrived: True to include the mean changes, which are not yet taken over.
        """
        found = self._reducer.state()
        for name, tensors, wanted in (
            (BASE, self._base, with_base),
            (ARRIVED, self._changes, with_arrived and self._is_finite),
        ):
            for number, tensor in enumerate(tensors if wanted else ()):
                shape = tuple(tensor.shape)
                found.append(
                    StateTensor(
                        name=f"{name}{number}", tensor=tensor, global_shape=shape, offset=(0,) * len(shape)
                    )
                )
        return found

    def rows_to_load(self, shapes: Shapes) -> dict[str, list[range]]:
        return self._reducer.rows_to_load(shapes)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None) -> None:
        """Restores `state`. Collective. A `base` that was not saved is that of the parameters."""
        self._reducer.load_state(tensors, shapes)
        self.begin_again()
        self._is_finite = f"{ARRIVED}0" in tensors
        for name, into in ((BASE, self._base), (ARRIVED, self._changes)):
            for number, tensor in enumerate(into):
                if f"{name}{number}" in tensors:
                    tensor.copy_(tensors[f"{name}{number}"])

    def bytes_sent(self) -> int:
        """Returns the payload bytes that this rank has sent to other nodes so far."""
        return self._reducer.bytes_sent()

    def close(self) -> bool:
        """Ends the reduction thread. Returns False if a reduction hangs."""
        return self._pipeline is None or self._pipeline.close()


@final
class NormStatistics:
    """Averages the running statistics of batch and instance norm layers over the workers, in float64.

    The mean of equal values is exactly that value. Other buffers of a model stay each rank's own.
    """

    def __init__(self, model: torch.nn.Module | None, *, comm: Collective, share: float) -> None:
        """Stores the arguments. model: None: there are no statistics. share: see `ParameterAverage`."""
        self._model = model
        self._comm = comm
        self._share = share

    @torch.no_grad()
    def average(self) -> None:
        """Replaces the statistics by their mean over the workers. Collective if the model has such layers."""
        found = [
            statistic
            for module in (self._model.modules() if self._model is not None else ())
            if isinstance(module, _NormBase)
            for statistic in (module.running_mean, module.running_var)
            if statistic is not None
        ]
        if not found or self._comm.num_ranks == 1:
            return
        sums = torch.cat([statistic.double().reshape(-1) for statistic in found]).cpu() * self._share
        self._comm.all_reduce(sums)
        for statistic, mean in zip(found, sums.split([s.numel() for s in found]), strict=True):
            statistic.copy_(mean.view(statistic.shape))


def _real(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a view of the parameter's values, of a complex parameter as pairs of real numbers."""
    values = parameter.detach()
    return torch.view_as_real(values) if values.is_complex() else values
