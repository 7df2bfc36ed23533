"""Plans buckets, fills them as gradients become ready, and submits them in the same order on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import final

import torch

from hpctrain.reduce.contract.bucket_plan import Bucket, Milestone, milestones, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.contract.step_end import GradientSquares
from hpctrain.reduce.contract.updater import BackwardTimes
from hpctrain.reduce.data_parallel.gradient_memory import (
    GradientMemory,
    describe_gradient,
    one_device,
)
from hpctrain.reduce.data_parallel.parameter_checks import ParameterChecks


@final
class BackwardClock:
    """Context manager around the last backward of a step, which records when each bucket becomes complete.

    Predictions of the scaling to more nodes use these times.
    """

    def __init__(self) -> None:
        self.reset()

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._ended = time.perf_counter()

    def filled(self) -> None:
        """Records that the next bucket is complete."""
        self._filled.append(time.perf_counter())

    def reset(self) -> None:
        self._began = self._ended = 0.0
        self._filled: list[float] = []

    def times(self, buckets: Sequence[Bucket], *, update_s: float) -> BackwardTimes | None:
        """Returns the times of the step.

        Returns None if backward ran outside of this context manager, or if a bucket was incomplete when backward ended.
        """
        if not self._began < self._ended or not self._filled or self._filled[-1] > self._ended:
            return None
        return BackwardTimes(
            backward_s=self._ended - self._began,
            update_s=update_s,
            ready_s=tuple([filled - self._began for filled in self._filled]),
            bucket_bytes=tuple([bucket.numel * bucket.dtype.itemsize for bucket in buckets]),
        )


# Plans buckets, fills them as gradients become ready, and submits them in the order that all ranks share.


# Minimum number of elements before a partly filled bucket is announced: 128 KB of float32.
_MIN_ANNOUNCED_ELEMS = 1 << 15


@final
class BucketFilling:
    """Fills the buckets of `memory` with the gradients of one step at a time.

    checks: checks of the parameters. If a gradient cannot be written, these checks explain the error.
    reducer: reducer that sums the buckets.
    announces: True to tell the reducer when a part of a bucket is filled (`BucketReducer.filled`).
    submit: function that is called with the index of each complete bucket.
    clock: clock that records when buckets are complete.

    ready: indices of the parameters whose gradients became ready in this step, in the order of becoming ready.
    """

    def __init__(
        self,
        memory: GradientMemory,
        *,
        checks: ParameterChecks,
        reducer: BucketReducer,
        announces: bool,
        submit: Callable[[int], None],
        clock: BackwardClock,
    ) -> None:
        self._memory = memory
        self._checks = checks
        self._reducer = reducer
        self._announces = announces
        self._submit = submit
        self._clock = clock
        # Without overlap, ranks that have finished backward start to sum the elements that the others have announced.
        self._milestones: dict[int, Milestone] = (
            milestones(memory.buckets, least_elems=_MIN_ANNOUNCED_ELEMS) if announces else {}
        )
        self._num_parameters = sum(len(bucket.slots) for bucket in memory.buckets)
        self.begin_step()

    def begin_step(self) -> None:
        self.ready: list[int] = []
        self._waiting_for = [len(bucket.slots) for bucket in self._memory.buckets]
        self._placed = [False] * self._num_parameters
        self._next_bucket = 0

    @property
    def has_begun(self) -> bool:
        """True if at least one gradient of this step is in its bucket."""
        return any(self._placed)

    def begins_again(self, index: int) -> bool:
        """Returns True if a gradient becomes ready that cannot be one of this step.

        Its bucket has it already, or the script has dropped the gradient that became ready before it.
        """
        if self._placed[index]:
            return True
        if not self.ready:
            return False
        parameter, placeholder = self._memory.pending[self.ready[-1]]
        return parameter.grad is not placeholder

    def gradient_is_ready(self, index: int, *, factor: float) -> None:
        """Writes a parameter's gradient, times `factor`, into its bucket, and submits the buckets that are complete.

        Call it once per parameter and step.
        """
        waiting_for = self._put(index, factor=factor)
        self.ready.append(index)
        if waiting_for == 0:
            self.send_complete()
        elif (milestone := self._milestones.get(index)) is not None:
            self._announce_filled(milestone)

    def put_rest(self, *, factor: float) -> None:
        """Writes the gradients that no hook has written.

        These are the gradients of unused parameters and, on ranks without samples, all gradients.
        """
        if not all(self._placed):
            for index, placed in enumerate(self._placed):
                if not placed:
                    self._put(index, factor=factor)

    def put_zeros(self) -> None:
        """Writes zeros for all parameters whose gradient is not in its bucket yet."""
        for index, placed in enumerate(self._placed):
            if not placed:
                self._placed[index] = True
                self._waiting_for[self._memory.put_zeros(index)] -= 1

    def send_complete(self) -> None:
        """Submits full buckets in the order of the plan, which is the same on every rank, so that reductions match."""
        while self._next_bucket < len(self._waiting_for) and self._waiting_for[self._next_bucket] == 0:
            self._memory.complete(self._next_bucket)
            self._clock.filled()
            if self._announces:
                self._reducer.filled(self._next_bucket, self._memory.buckets[self._next_bucket].numel)
            self._submit(self._next_bucket)
            self._next_bucket += 1

    def _put(self, index: int, *, factor: float) -> int:
        """Writes a gradient into its bucket. Returns the number of gradients that the bucket still lacks."""
        try:
            bucket = self._memory.put(index, factor=factor)
        except RuntimeError:
            self._checks.check_kinds()
            raise
        self._placed[index] = True  # only now: if memory was short in `put`, `step` writes it again
        self._waiting_for[bucket] -= 1
        return self._waiting_for[bucket]

    def _announce_filled(self, milestone: Milestone) -> None:
        """Announces a filled part of a bucket; does nothing if some gradients of this part are not ready yet."""
        if all(self._placed[index] for index in milestone.parameters):
            self._reducer.filled(milestone.bucket, milestone.num_elems)


@final
class PlannedBuckets:
    """The buckets for the gradients of `parameters`, with their memory and the object that fills them.

    The constructor is collective.

    bucket_bytes: maximum size of a bucket's gradients. The other arguments are those of `BucketFilling`.

    order: indices of the parameters in the order in which gradients become ready; the same on every rank, None until
    known.

    Raises UsageError if parameters are on several devices.
    """

    memory: GradientMemory
    filling: BucketFilling
    squares: GradientSquares

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        checks: ParameterChecks,
        reducer: BucketReducer,
        bucket_bytes: int,
        announces: bool,
        submit: Callable[[int], None],
        clock: BackwardClock,
    ) -> None:
        self.device = one_device(parameters)
        self.order: list[int] | None = None
        self._parameters = parameters
        self._checks = checks
        self._reducer = reducer
        self._bucket_bytes = bucket_bytes
        self._announces = announces
        self._submit = submit
        self._clock = clock
        self._specs = [describe_gradient(p) for p in parameters]
        self._lay_out(self._in_order())

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.memory.buckets

    def plan_again(self, order: Sequence[int] | None) -> None:
        """Plans the buckets again in another order, the same on every rank. Collective."""
        self.order = None if order is None else list(order)
        buckets = self._in_order()
        if buckets != self.memory.buckets:
            self._lay_out(buckets)

    def _in_order(self) -> tuple[Bucket, ...]:
        return plan_buckets(self._specs, bucket_bytes=self._bucket_bytes, order=self.order)

    def _lay_out(self, buckets: tuple[Bucket, ...]) -> None:
        buffers = self._reducer.plan(buckets, device=self.device)
        self.squares = GradientSquares(buckets, buffers)
        self.memory = GradientMemory(self._parameters, buckets=buckets, buffers=buffers)
        self.filling = BucketFilling(
            self.memory,
            checks=self._checks,
            reducer=self._reducer,
            announces=self._announces,
            submit=self._submit,
            clock=self._clock,
        )
