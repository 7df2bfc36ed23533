"""Data parallelism: every rank holds all parameters, and gradients are summed over the ranks in buckets."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm import Collective, broadcast_json
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket, completed_order
from hpctrain.reduce.contract.bucket_reducer import (
    LONGEST_WAIT_CROWDED_S,
    LONGEST_WAIT_S,
    BucketReducer,
    Chooser,
    InBackground,
    Numbers,
    Reduced,
    Shapes,
    StateTensor,
    result_of,
)
from hpctrain.reduce.contract.step_end import all_reduced, check_divide_by, clip_factor, divisor
from hpctrain.reduce.contract.updater import Accepts, ReductionObserver, StepOutcome
from hpctrain.reduce.data_parallel.bucket_filling import BackwardClock, PlannedBuckets
from hpctrain.reduce.data_parallel.gradient_buckets import asks_for_gradients, ran_twice
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.parameter_checks import (
    ParameterChecks,
    check_open,
    check_options,
    trainable,
)
from hpctrain.reduce.data_parallel.reduction_thread import InFlight, ReductionPipeline
from hpctrain.reduce.watch.step_watch import Watched, watched


@final
class AllReduceUpdater(Watched):
    """`DistributedOptimizer` that sums gradient buckets on a separate thread while backward runs.

    The constructor is collective. A plain `loss.backward()` has weight 1/num_ranks, like Horovod's average. From
    backward to `step` a parameter's `.grad` cannot be read or changed, unless `synchronize` is called; sparse
    gradients are made dense. In the first step the buckets follow the reverse order of registration, later the order
    in which gradients became ready on rank 0.

    Args:
        optimizer: Any torch optimizer; its parameters have the same shapes, in the same order, on every rank.
        comm: Communicator of all ranks, used from the calling thread for the small sums of a step if the reducer
            cannot sum them.
        reducer: Sums buckets over all ranks, from the reduction thread and, between steps, from the calling thread. It
            needs a separate communicator; the caller closes it after the updater.
        bucket_bytes: Maximum size of a bucket's gradients.
        loss_scale: Loss scale; None means 1, or 1024 and dynamic with the wire format fp16.
        clip_norm: Limit of the global 2-norm of the gradients; None means no clipping.
        max_in_flight: Maximum number of reductions in flight.
        overlap: False to reduce in `step`, on the calling thread; only reductions that a thread outside Python
            continues (`InBackground`) then still start within backward.
        crowded: True if there are more ranks than cores; polls for progress are then further apart.
        model: Model that computes with the parameters, to notice if its parameters are replaced.

    Raises:
        UsageError: An argument is invalid, or the optimizer has no trainable parameters, or parameters on several
            devices.
    """

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
        crowded: bool = False,
        model: torch.nn.Module | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._comm = comm
        self._reducer = reducer
        self._chooser = reducer if isinstance(reducer, Chooser) else None
        self._distributed = comm.num_ranks > 1
        reducer.keep_squares()
        self._clip_norm = clip_norm
        self._parameters = trainable(optimizer)
        check_options(self._parameters, clip_norm=clip_norm, max_in_flight=max_in_flight)
        self._scale = loss_scale or LossScale.for_wire(reducer.wire)
        self._checks = ParameterChecks(optimizer, self._parameters, model=model)
        self._clock = BackwardClock()
        self._pipeline: ReductionPipeline | None = None
        self._planned = PlannedBuckets(
            self._parameters, checks=self._checks, reducer=reducer, bucket_bytes=bucket_bytes, clock=self._clock,
            submit=self._submit, announces=self._distributed and not overlap,
        )  # fmt: skip
        if self._distributed:
            self._pipeline = ReductionPipeline(
                reducer.reduce,
                device=self._planned.device,
                max_in_flight=max_in_flight,
                overlap=overlap,
                longest_wait_s=LONGEST_WAIT_CROWDED_S if crowded else LONGEST_WAIT_S,
                in_background=reducer.in_background if isinstance(reducer, InBackground) else None,
            )
        self._overlap = overlap
        self._syncing = True
        self._closed = False
        self._synchronized = False  # True from `synchronize` to the end of the step
        self._summed_scale = 1.0
        self._reset()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(index))
            for index, p in enumerate(self._parameters)
        ]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, whose state is saved, and which learning rate schedulers need."""
        return self._optimizer

    @property
    def loss_scale(self) -> LossScale:
        return self._scale

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of one step, in the order in which they are reduced."""
        return self._planned.buckets

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """See `DistributedOptimizer.backward`. Raises UsageError for a loss that does not have exactly one element."""
        scaled = self._scale.scaled(loss, weight=weight)
        self._abandon_dropped()
        self._unsent_factor, self._weighted = 1.0, True
        if last:
            with self._clock:
                scaled.backward()
        else:
            with self.no_sync():
                scaled.backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `DistributedOptimizer.no_sync`."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's `param_groups`, for scripts that set the learning rate through their optimizer.

        A GradScaler that reads them gets summed gradients: see `synchronize`.
        """
        if asks_for_gradients(sys._getframe(1)):
            self.synchronize()
        return self._optimizer.param_groups

    def zero_grad(self) -> None:
        """See `DistributedOptimizer.zero_grad`. It has the signature of the optimizer's own method.

        Between backward and `step` it waits for the sums that have started, and is collective.
        """
        self._optimizer.zero_grad(set_to_none=True)
        if self._planned.filling.has_begun:
            self._abandon()
        else:
            self._unsent_factor, self._weighted = self._scale.value / self._comm.num_ranks, False

    def synchronize(self) -> None:
        """Completes the sums after backward, so that each `.grad` is the mean over the ranks. Collective.

        Until `step` or `zero_grad` the script may read and change the gradients, in the same way on every rank. A
        second call does nothing. It is for GradScaler, which calls it itself, and for `clip_grad_norm_` if `clip_norm`
        is not sufficient. If the sums are not finite, buffers that forward has changed are restored.
        """
        if self._synchronized:
            return
        self._check_before_sum()
        self._finish_sums()
        self._planned.memory.scale(1.0 / self._summed_scale)
        self._summed_scale = 1.0
        fits = self._planned.memory.copy_out()
        self._planned.memory.give_out()
        self._synchronized = True
        if self.step_watch is not None and not (fits and 0 <= self._planned.squares.of_all() < math.inf):
            # A GradScaler will skip this step, without a word. Later the next forward may have begun, whose backward
            # needs the buffers as they are then.
            self.step_watch.drop()

    @watched
    def step(
        self,
        *,
        sums: Mapping[str, float] | None = None,
        accepts: Accepts | None = None,
        divide_by: str | None = None,
    ) -> StepOutcome:
        """See `DistributedOptimizer.step`.

        Raises UsageError also if the updater is closed, or if parameters or gradients were changed since `backward` in
        a way that `step` cannot take into account.
        """
        plain = not self._weighted and any(p.grad is not None for p in self._parameters)
        check_divide_by(
            divide_by, sums=sums, plain=plain, wire=None if self.sums_to_one else self._reducer.wire
        )
        self._check_before_sum()
        started = time.perf_counter()
        reduced, in_flight = self._finish_reduction(self._numbers(sums or {}))
        ended = time.perf_counter()
        waited_s = ended - started
        replan, *numbers = reduced.numbers.tolist()
        totals = dict(zip(sorted(sums or {}), numbers, strict=True))
        square = reduced.norm_square
        total = divisor(totals, divide_by=divide_by)
        self._summed_scale *= total
        norm = math.sqrt(square) / self._summed_scale if square >= 0 and total else math.nan
        finite = math.isfinite(norm)
        accepted = (accepts is None or accepts(norm if finite else math.nan, totals)) and total != 0
        applied = accepted and finite and self._take_gradients(norm)
        if applied:
            if not self._synchronized:
                self._planned.memory.give_out()
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._planned.memory.forget(applied=applied)
        used_scale = self._scale.value
        if accepted:
            self._scale = self._scale.after_good_step() if applied else self._scale.after_overflow()
        self._reducer.settle(applied=applied, rescale=self._scale.value / used_scale)
        times = self._clock.times(self.buckets, update_s=time.perf_counter() - started - waited_s)
        if replan and accepted:  # after a backward that failed half-way, the order is not known
            seen = completed_order(self._planned.filling.ready, num_parameters=len(self._parameters))
            self._planned.plan_again(broadcast_json(self._comm, seen))
        self._reset()
        self._scale.check(used_value=used_scale)
        return StepOutcome(
            applied=applied,
            grad_norm=norm if applied or (finite and not accepted) else math.nan,
            loss_scale=used_scale,
            sums=totals,
            sync_s=in_flight.total_s if self._distributed else waited_s,
            hidden_sync_s=in_flight.hidden_s,
            exposed_sync_s=waited_s if self._distributed else 0.0,
            update_s=time.perf_counter() - ended,
            times=times,
        )

    def wait_for_parameters(self) -> None:
        """Does nothing: `step` has already updated all parameters."""

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """See `DistributedOptimizer.observe_reductions`."""
        if self._pipeline is not None:
            self._pipeline.observer = observer

    def state(self) -> dict[str, Any]:
        """See `DistributedOptimizer.state`: loss scale, order of the gradients, choice of algorithms."""
        state = {"loss_scale": asdict(self._scale), "order": self._planned.order}
        return {**state, **({"reduction": self._chooser.choice_state()} if self._chooser is not None else {})}

    def state_tensors(self) -> list[StateTensor]:
        """See `BucketReducer.state`."""
        return self._reducer.state()

    def rows_to_load(self, state: Mapping[str, Any], shapes: Shapes) -> dict[str, list[range]]:
        if self._chooser is not None and self._chooser.choice_state() != state.get("reduction"):
            return {}  # the saved run's algorithm may run here too, and need other rows
        return self._reducer.rows_to_load(shapes)

    def load_state(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """See `DistributedOptimizer.load_state`. Raises UsageError if it is called between `backward` and `step`.

        tensors: saved tensors, with the shapes and dtypes that `state_tensors` had in the saved run.
        """
        if self._planned.filling.has_begun:
            raise UsageError("load_state was called between backward and step(): call it between steps")
        saved = state["loss_scale"]
        self._scale = self._scale.continued(saved)
        # Restore algorithms and buckets: the order of a sum depends on the algorithm, and may depend on an element's
        # place in its bucket.
        bucket_bytes = None
        if self._chooser is not None and "reduction" in state:
            before = self._chooser.choice_state()
            recalled = self._chooser.recall(state["reduction"])
            if self._chooser.choice_state() != before:
                bucket_bytes = recalled
        self._planned.plan_again(state.get("order"), bucket_bytes=bucket_bytes)
        self._reset()
        self._reducer.load_state(tensors or {}, shapes)
        if self._scale.value != saved["value"]:
            # Residuals are in the unit of the buckets: gradients times the loss scale at the time of saving.
            self._reducer.settle(applied=False, rescale=self._scale.value / saved["value"])

    def close(self) -> bool:
        """See `DistributedOptimizer.close`. If it returns False, a hanging reduction still uses its memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        ended = self._pipeline is None or self._pipeline.close()
        if not self._closed:
            self._planned.memory.leave()
        self.step_watch = None
        self._closed = True
        return ended

    # ------------------------------------------------------------------ implementation

    def _submit(self, number: int) -> None:
        if self._pipeline is not None:
            self._pipeline.submit(number)

    def _reset(self) -> None:
        self._planned.filling.begin_step()
        self._synchronized = False
        self._weighted = False
        self._clock.reset()
        # Factor for gradients of a plain `loss.backward()`, applied when they are written into the bucket. It must be
        # applied before the reduction, as the sum of many ranks' gradients near 1024 overflows float16.
        self._unsent_factor = self._scale.value / self._comm.num_ranks
        unscale = 1.0 / self._scale.value
        unscaled = self._distributed and self._reducer.begin_step(unscale) == unscale
        self._summed_scale = 1.0 if unscaled else self._scale.value

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            filling = self._planned.filling
            if filling.is_placed(index) or filling.last_is_dropped():
                self._begin_again()
            if self._syncing:
                filling.gradient_is_ready(index, factor=self._unsent_factor)

        return gradient_is_ready

    def _begin_again(self) -> None:
        """Handles a gradient that arrives after gradients were already sent.

        If the script has set those to None, by `zero_grad` of the model or the optimizer, their step is abandoned.
        Otherwise raises UsageError.
        """
        if self._planned.memory.any_is_given():
            raise UsageError(
                "backward ran after the gradients were summed: call updater.step(), or updater.zero_grad() if the step "
                "is left out, as GradScaler does after an overflow"
            )
        if self._planned.memory.any_is_pending():
            raise ran_twice()
        self._abandon()

    def _abandon_dropped(self) -> None:
        """Abandons a step whose gradients the script has dropped, by `zero_grad` of the model or the optimizer."""
        if self._planned.filling.has_begun and all(p.grad is None for p in self._parameters):
            self._abandon()

    def _abandon(self) -> None:
        """Ends a step that will not be made because the script has dropped its gradients. Collective."""
        if not self._synchronized:
            self._planned.filling.put_zeros()
            self._finish_sums()
        if self._distributed:
            result_of(self._reducer.finish(np.zeros(1), comm=self._comm))
        self._planned.memory.forget(applied=False)
        self._reducer.settle(applied=False, rescale=1.0)
        self._reset()

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

    def _finish_reduction(self, numbers: Numbers) -> tuple[Reduced, InFlight]:
        """Submits the remaining buckets, waits for all of them, and sums `numbers`. Collective."""
        none = InFlight(0.0, 0.0)
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

    def _take_gradients(self, norm: float) -> bool:
        """Clips and unscales the sums. Returns True if every gradient fits into the dtype of its parameter."""
        self._planned.memory.scale(clip_factor(norm, clip_norm=self._clip_norm) / self._summed_scale)
        return self._planned.memory.copy_out()

    def _numbers(self, sums: Mapping[str, float]) -> Numbers:
        """Returns the numbers that are summed in addition to the gradients, shape (n,).

        The first is 1 if this is rank 0 and it has just learned the order in which gradients become ready, otherwise
        0. The caller's numbers follow, sorted by name.
        """
        may_know = self._distributed and self._planned.order is None and self._comm.rank == 0
        news = may_know and bool(self._planned.filling.ready)
        return np.array([news, *(float(sums[k]) for k in sorted(sums))], dtype=np.float64)
