"""Data parallelism: every rank holds all parameters, and gradients are summed over the ranks in buckets."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, final

import numpy as np
import torch

from hpctrain.comm import Collective, broadcast_json
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket, completed_order
from hpctrain.reduce.contract.bucket_reducer import (
    LONGEST_WAIT_OVERSUBSCRIBED_S,
    LONGEST_WAIT_S,
    BucketReducer,
    InBackground,
    Numbers,
    Reduced,
    result_of,
)
from hpctrain.reduce.contract.step_end import all_reduced
from hpctrain.reduce.contract.updater import ReductionObserver
from hpctrain.reduce.data_parallel.bucket_filling import PlannedBuckets
from hpctrain.reduce.data_parallel.gradient_memory import ran_twice
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.parameter_checks import (
    ParameterChecks,
    check_open,
    check_updater_options,
)
from hpctrain.reduce.data_parallel.reduction_thread import ReductionPipeline, TimeInFlight
from hpctrain.reduce.data_parallel.updater_base import StepSums, UpdaterBase


class MeasuredChoice(Protocol):
    """The algorithm, wire format and bucket size that measurements have chosen for one updater."""

    def document(self) -> dict[str, Any]:
        """Returns the choice for a checkpoint, as values for JSON."""

    def can_become(self, saved: Any) -> bool:
        """Returns True if `saved` differs from this choice and is possible in this run. Not collective.

        saved: the `document` of a saved choice; None if the checkpoint has no choice.
        """

    def become(self, saved: Mapping[str, Any]) -> tuple[BucketReducer, int]:
        """Closes the reducer, and creates the reducer of the saved choice. Collective.

        Returns the new reducer, and the bucket size of the saved choice in bytes.
        """


@final
class AllReduceUpdater(UpdaterBase):
    """`DistributedOptimizer` that sums gradient buckets on a separate thread while backward runs.

    The constructor is collective. A plain `loss.backward()` has weight 1/num_ranks, like Horovod's average. From
    backward to `step` a parameter's `.grad` cannot be read or changed, unless `synchronize` is called. Sparse
    gradients are made dense. In the first step the parameters are assigned to buckets in the reverse order of
    registration, later in the order in which gradients became ready on rank 0.

    Args:
        optimizer: Any torch optimizer; its parameters have the same shapes, in the same order, on every rank.
        comm: Communicator of all ranks. The calling thread uses it for the small sums of a step, if the reducer cannot
            compute them.
        reducer: Sums buckets over all ranks, on the reduction thread and, between steps, on the calling thread. The
            reducer needs a communicator of its own. The caller closes the reducer after the updater.
        bucket_bytes: Maximum size of a bucket's gradients.
        loss_scale: Loss scale; None means 1, or 1024 and dynamic with the wire format fp16.
        clip_norm: Limit of the global 2-norm of the gradients; None means no clipping.
        max_in_flight: Maximum number of reductions in flight.
        overlap: True to reduce on a separate thread during backward. False to reduce in `step`, on the calling thread;
            then only reductions that a thread outside Python continues (`InBackground`) start during backward.
        oversubscribed: True if there are more ranks than cores, and buckets are reduced during backward; polls for
            progress are then further apart.
        model: Model that computes with the parameters. The updater checks that the model's parameters are not replaced.
        choice: The measured choice from which `reducer` and `bucket_bytes` come; None if the user asked for them. The
            choice is saved in checkpoints, and the choice of a loaded checkpoint replaces it.
        plain_weight: Weight of a plain `loss.backward()`; None: 1 / (number of ranks).

    Raises:
        UsageError: An argument is invalid, or the optimizer has no trainable parameters, or parameters on several
            devices.
    """

    _gives_sums = True

    _synchronized: bool  # True from `synchronize` to the end of the step
    _summed_scale: float  # of the sums: the loss scale, or 1 if the reducer or `synchronize` has removed it

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        reducer: BucketReducer,
        bucket_bytes: int = 4_000_000,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
        max_in_flight: int = 4,
        overlap: bool = True,
        oversubscribed: bool = False,
        model: torch.nn.Module | None = None,
        choice: MeasuredChoice | None = None,
        plain_weight: float | None = None,
    ) -> None:
        super().__init__(
            optimizer, comm=comm, loss_scale=loss_scale or LossScale.for_wire(reducer.wire), clip_norm=clip_norm,
            reducer=reducer, wire=reducer.wire, plain_weight=plain_weight,
        )  # fmt: skip
        self._scale_is_given = loss_scale is not None
        self._choice = choice
        self._distributed = comm.num_ranks > 1
        check_updater_options(self._parameters, clip_norm=clip_norm, max_in_flight=max_in_flight)
        self._checks = ParameterChecks(optimizer, self._parameters, model=model)
        self._max_in_flight = max_in_flight
        self._overlap = overlap
        self._longest_wait_s = LONGEST_WAIT_OVERSUBSCRIBED_S if oversubscribed else LONGEST_WAIT_S
        self._pipeline: ReductionPipeline | None = None
        self._use(reducer, bucket_bytes=bucket_bytes)
        self._begin_step()
        self._register_hooks(self._hook)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of one step, in the order in which they are reduced."""
        return self._planned.buckets

    @property
    def order(self) -> list[int] | None:
        """The indices of the parameters in the order in which gradients become ready; None until it is known."""
        return self._planned.order

    def synchronize(self) -> None:
        """Completes the sums after backward, so that each `.grad` is the mean over the ranks. Collective.

        Until `step` or `zero_grad` the script may read and change the gradients, in the same way on every rank. A
        second call does nothing. Call `synchronize` before `clip_grad_norm_`, if `clip_norm` is not sufficient. With a
        GradScaler no call is needed: the GradScaler reads `param_groups`, which calls `synchronize`. If the sums are
        not finite, buffers that forward has changed are restored.
        """
        if self._synchronized:
            return
        self._check_before_sum()
        self._finish_sums()
        self._planned.memory.scale(1.0 / self._summed_scale)
        self._summed_scale = 1.0
        fits = self._planned.memory.copy_out()
        self._planned.memory.set_gradients()
        self._synchronized = True
        if self.step_watch is not None and not (fits and 0 <= self._planned.squares.of_all() < math.inf):
            # A GradScaler will skip this step, without a word. Later the next forward may have begun, whose backward
            # needs the buffers as they are then.
            self.step_watch.drop()

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """See `DistributedOptimizer.observe_reductions`."""
        if self._pipeline is not None:
            self._pipeline.observer = observer

    def state(self) -> dict[str, Any]:
        """See `DistributedOptimizer.state`: the loss scale, the order of the gradients, and a measured choice."""
        choice = {"choice": self._choice.document()} if self._choice is not None else {}
        return {**super().state(), "order": self._planned.order, **choice}

    def prepare_to_load(self, state: Mapping[str, Any]) -> None:
        """See `DistributedOptimizer.prepare_to_load`. Raises UsageError between `backward` and `step`."""
        saved = state.get("choice")
        if self._choice is None or saved is None or not self._choice.can_become(saved):
            return
        if self._scale_is_given and saved["wire"] != self._wire:
            return  # the loss scale was made for this wire format
        if self._has_begun:
            raise UsageError("a checkpoint was loaded between backward and step(): load it between steps")
        observer = None if self._pipeline is None else self._pipeline.observer
        self._release()
        reducer, bucket_bytes = self._choice.become(saved)
        if reducer.wire != self._wire:
            self._scale = LossScale.for_wire(reducer.wire)
        self._state_keeper, self._wire = reducer, reducer.wire
        self._use(reducer, bucket_bytes=bucket_bytes)
        self.observe_reductions(observer)
        self._begin_step()

    # ------------------------------------------------------------------ implementation

    def _use(self, reducer: BucketReducer, *, bucket_bytes: int) -> None:
        """Plans the buckets and starts the reduction thread of a reducer. Collective."""
        self._reducer = reducer
        reducer.keep_squares()
        self._planned = PlannedBuckets(
            self._parameters, checks=self._checks, reducer=reducer, bucket_bytes=bucket_bytes, clock=self._clock,
            submit=self._submit, announces=self._distributed and not self._overlap,
        )  # fmt: skip
        if self._distributed:
            self._pipeline = ReductionPipeline(
                reducer.reduce,
                device=self._planned.device,
                max_in_flight=self._max_in_flight,
                overlap=self._overlap,
                longest_wait_s=self._longest_wait_s,
                in_background=reducer.in_background if isinstance(reducer, InBackground) else None,
            )

    def _sum(self, sums: Mapping[str, float]) -> StepSums:
        self._check_before_sum()
        started = time.perf_counter()
        reduced, in_flight = self._finish_reduction(self._numbers(sums))
        ended = time.perf_counter()
        waited_s = ended - started
        order_is_new, *numbers = reduced.numbers.tolist()
        return StepSums(
            norm_square=reduced.norm_square,
            totals=dict(zip(sorted(sums), numbers, strict=True)),
            scale=self._summed_scale,
            order_is_new=order_is_new > 0,
            update_from=ended,
            sync_s=in_flight.total_s if self._distributed else waited_s,
            hidden_sync_s=in_flight.hidden_s,
            exposed_sync_s=waited_s if self._distributed else 0.0,
        )

    def _update(self, factor: float, summed: StepSums) -> bool:
        memory = self._planned.memory
        if memory.has_copies:
            memory.scale(factor)
            factor = 1.0
            if not memory.copy_out():
                return False
        if self._synchronized:
            memory.set_changed_gradients()
        else:
            memory.set_gradients()
        self._optimizer_step.step(factor, scale=memory.scale)
        return True

    def _end_step(self, summed: StepSums, *, applied: bool, accepted: bool, rescale: float) -> None:
        self._drop_gradients()
        self._planned.memory.forget(applied=applied)
        self._reducer.end_step(applied=applied, rescale=rescale)
        summed.times = self._clock.times(self.buckets, update_s=time.perf_counter() - summed.update_from)
        if summed.order_is_new and accepted:  # after a backward that failed half-way, the order is not known
            seen = completed_order(self._planned.filling.ready, num_parameters=len(self._parameters))
            self._planned.plan_again(broadcast_json(self._comm, seen))
        self._begin_step()

    def _release(self) -> bool:
        """See `UpdaterBase._release`. If it returns False, a hanging reduction still uses the memory of its bucket."""
        ended = self._pipeline is None or self._pipeline.close()
        if not self._closed:
            self._planned.memory.release()
        return ended

    @property
    def _has_begun(self) -> bool:
        return self._planned.filling.has_begun

    def _plan_as_saved(self, state: Mapping[str, Any]) -> None:
        # The order of a sum may depend on an element's place in its bucket.
        self._planned.plan_again(state.get("order"))

    def _submit(self, number: int) -> None:
        if self._pipeline is not None:
            self._pipeline.submit(number)

    def _begin_step(self) -> None:
        super()._begin_step()
        self._planned.filling.begin_step()
        self._synchronized = False
        unscale = 1.0 / self._scale.value
        unscaled = self._distributed and self._reducer.begin_step(unscale) == unscale
        self._summed_scale = 1.0 if unscaled else self._scale.value

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            filling = self._planned.filling
            if filling.begins_again(index):
                self._begin_again()
                filling = self._planned.filling
            if self._syncing:
                filling.gradient_is_ready(index, factor=self._unsent_factor)

        return gradient_is_ready

    def _begin_again(self) -> None:
        """Handles a gradient that becomes ready after gradients of this step were already sent.

        If the script has set the sent gradients to None, by `zero_grad` of the model or the optimizer, the step is
        abandoned and a new one begins. Otherwise raises UsageError.
        """
        if self._planned.memory.any_is_given():
            raise UsageError(
                "backward ran after the gradients were summed: call updater.step(), or updater.zero_grad() if the step "
                "is left out, as GradScaler does after an overflow"
            )
        if self._planned.memory.any_is_pending():
            raise ran_twice()
        self._abandon()

    def _abandon(self) -> None:
        """Ends a step that is not applied because the script has dropped its gradients. Collective."""
        if not self._synchronized:
            self._planned.filling.put_zeros()
            self._finish_sums()
        if self._distributed:
            result_of(self._reducer.finish(np.zeros(1), comm=self._comm))
        self._planned.memory.forget(applied=False)
        self._reducer.end_step(applied=False, rescale=1.0)
        self._begin_step()

    def _check_before_sum(self) -> None:
        """Raises UsageError unless the gradients can be summed.

        It also writes the gradients that no hook has written into their buckets.
        """
        check_open(closed=self._closed)
        self._checks.check()
        self._abandon_dropped()
        if not self._synchronized:
            self._planned.filling.put_rest(factor=self._unsent_factor)
            self._planned.memory.check_untouched()

    def _finish_sums(self) -> None:
        """Submits the remaining buckets and waits for all of them. Collective."""
        self._planned.filling.send_complete()
        if self._pipeline is not None:
            self._pipeline.wait()

    def _finish_reduction(self, numbers: Numbers) -> tuple[Reduced, TimeInFlight]:
        """Submits the remaining buckets, waits for all of them, and sums `numbers`. Collective."""
        none = TimeInFlight(0.0, 0.0)
        if self._synchronized:
            self._planned.memory.take_changes()
        if self._pipeline is None:  # one rank: its gradients are the sums
            self._planned.filling.send_complete()
            return result_of(all_reduced(self._planned.squares, numbers, comm=self._comm)), none
        finish = functools.partial(self._reducer.finish, numbers, comm=self._comm)
        if self._synchronized:
            return replace(result_of(finish()), norm_square=self._planned.squares.of_all()), none
        # With overlap, a reduction may have started on only some ranks: then all ranks call `finish` afterwards.
        finishing = None if self._overlap else finish()
        self._planned.filling.send_complete()
        in_flight = self._pipeline.wait()
        return result_of(finishing or finish()), in_flight

    def _numbers(self, sums: Mapping[str, float]) -> Numbers:
        """Returns the numbers that are summed in addition to the gradients, shape (n,).

        The first number is 1 if this is rank 0 and it has just learned the order in which gradients become ready,
        otherwise 0. The caller's numbers follow, sorted by name.
        """
        may_know = self._distributed and self._planned.order is None and self._comm.rank == 0
        news = may_know and bool(self._planned.filling.ready)
        return np.array([news, *[float(sums[name]) for name in sorted(sums)]], dtype=np.float64)
