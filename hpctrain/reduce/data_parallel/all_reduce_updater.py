"""Data parallel: every rank holds all parameters; gradients are summed over the ranks in buckets."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm import Collective, broadcast_json
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket, Milestone, completed_order, milestones, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import (
    BucketReducer,
    Chooser,
    InBackground,
    Numbers,
    Reduced,
    Shapes,
    StateTensor,
)
from hpctrain.reduce.contract.gradient_norm import GradientSquares
from hpctrain.reduce.contract.polling import LONGEST_WAIT_CROWDED_S, LONGEST_WAIT_S, result_of
from hpctrain.reduce.contract.step_end import all_reduced
from hpctrain.reduce.contract.updater import Accepts, ReductionObserver, StepOutcome
from hpctrain.reduce.data_parallel.backward_clock import BackwardClock
from hpctrain.reduce.data_parallel.gradient_buckets import GradientMemory, describe_gradient, one_device
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.reduction_thread import InFlight, ReductionPipeline
from hpctrain.reduce.watch.step_watch import Watched, watched

# Minimum number of elements before a partly filled bucket is announced: 128 KB of float32.
_MIN_ANNOUNCED_ELEMS = 1 << 15


@final
class AllReduceUpdater(Watched):
    """`Updater` that sums gradient buckets on a separate thread while backward runs. The constructor is collective.

    Args:
        optimizer: any torch optimizer; its parameters have the same shapes, in the same order, on every rank.
        comm: the world, used from the calling thread for the small sums of a step if the reducer cannot sum them.
        reducer: sums buckets over all ranks, from the reduction thread and, between steps, from the calling thread.
            It needs a separate communicator; the caller closes it after the updater.
        bucket_bytes: maximum size of a bucket's gradients.
        loss_scale: default 1, or 1024 and dynamic with the wire format fp16.
        clip_norm: limit of the global 2-norm of the gradients; None: no clipping.
        max_in_flight: maximum number of reductions in flight.
        overlap: False reduces in `step`, on the calling thread; only reductions that a thread outside Python continues
            (`InBackground`) still begin within backward.
        crowded: whether ranks outnumber their cores: then polls for progress are further apart.

    A plain `loss.backward()` has weight 1/num_ranks, like Horovod's average. After backward a parameter's `.grad`
    is a view of its bucket if the dtype allows; sparse gradients are made dense. In the first step buckets follow the
    reverse order of registration, then the order in which gradients became ready on rank 0.
    Raises UsageError for invalid arguments, and for an optimizer without trainable parameters or with parameters on
    several devices.
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
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm}: give a number above 0, or None for no clipping")
        if max_in_flight < 1:
            raise UsageError(f"max_in_flight is {max_in_flight}: give at least 1")
        self._optimizer = optimizer
        self._comm = comm
        self._reducer = reducer
        self._chooser = reducer if isinstance(reducer, Chooser) else None
        self._distributed = comm.num_ranks > 1
        reducer.keep_squares()
        self._bucket_bytes = bucket_bytes
        self._clip_norm = clip_norm
        self._parameters = self._trainable()
        if not self._parameters:
            raise UsageError("the optimizer holds no parameter that needs a gradient: nothing to train")
        self._device = one_device(self._parameters)
        fp16 = reducer.wire == "fp16"
        self._scale = loss_scale or LossScale(value=2.0**10 if fp16 else 1.0, dynamic=fp16)
        self._specs = [describe_gradient(p) for p in self._parameters]
        # Without overlap, ranks that have finished backward start to sum the elements that the others have announced.
        self._announces = self._distributed and not overlap
        self._milestones: dict[int, Milestone] = {}
        self._order: list[int] | None = None  # in which gradients become ready, once it is known
        self._memory = self._lay_out(self._buckets_in_order())
        self._pipeline = None
        if self._distributed:
            self._pipeline = ReductionPipeline(
                reducer.reduce,
                device=self._device,
                max_in_flight=max_in_flight,
                overlap=overlap,
                longest_wait_s=LONGEST_WAIT_CROWDED_S if crowded else LONGEST_WAIT_S,
                in_background=reducer.in_background if isinstance(reducer, InBackground) else None,
            )
        self._overlap = overlap
        self._syncing = True
        self._closed = False
        self._clock = BackwardClock()
        self._reset()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(index))
            for index, p in enumerate(self._parameters)
        ]

    # ------------------------------------------------------------------ interface of the training loop

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, whose state is saved and which learning rate schedulers take."""
        return self._optimizer

    @property
    def loss_scale(self) -> LossScale:
        return self._scale

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of one step, in the order in which they are reduced."""
        return self._memory.buckets

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """See `Updater.backward`. loss: one element, of any shape. Raises UsageError for another number of elements."""
        if loss.numel() != 1:
            raise UsageError(
                f"the loss has shape {tuple(loss.shape)}: give a single number, such as its mean"
            )
        self._unsent_factor = 1.0
        # `backward` with a gradient as its argument would import sympy: 0.3 s of every start.
        scaled = loss * (weight * self._scale.value)
        if last:
            with self._clock:
                scaled.backward()
        else:
            with self.no_sync():
                scaled.backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Updater.no_sync`."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's `param_groups`, for scripts that set the learning rate through their optimizer."""
        return self._optimizer.param_groups

    def zero_grad(self) -> None:
        """See `Updater.zero_grad`. Same signature as the optimizer's, for scripts that use the updater in its place."""
        self._optimizer.zero_grad(set_to_none=True)
        if not any(self._placed):
            self._unsent_factor = self._scale.value / self._comm.num_ranks

    @watched
    def step(self, *, sums: Mapping[str, float] | None = None, accepts: Accepts | None = None) -> StepOutcome:
        """See `Updater.step`. Raises UsageError also if the updater is closed, or if parameters or gradients were
        changed since `backward` in a way that `step` cannot take into account."""
        if self._closed:
            raise UsageError(
                "this updater is closed and no longer sums gradients over the ranks: make a new one"
            )
        self._check_parameters()
        self._put_rest()
        self._memory.check_untouched()
        started = time.perf_counter()
        reduced, in_flight = self._finish_reduction(self._numbers(sums or {}))
        ended = time.perf_counter()
        waited_s = ended - started
        replan, *numbers = reduced.numbers.tolist()
        totals = dict(zip(sorted(sums or {}), numbers, strict=True))
        square = reduced.norm_square
        norm = math.sqrt(square) / self._summed_scale if square >= 0 else math.nan
        finite = math.isfinite(norm)
        accepted = accepts is None or accepts(norm if finite else math.nan, totals)
        applied = accepted and finite and self._take_gradients(norm)
        if applied:
            self._memory.give_out()
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._memory.forget(applied=applied)
        used_scale = self._scale.value
        if accepted:
            self._scale = self._scale.after_good_step() if applied else self._scale.after_overflow()
        self._reducer.settle(applied=applied, rescale=self._scale.value / used_scale)
        times = self._clock.times(self.buckets, update_s=time.perf_counter() - started - waited_s)
        if replan and accepted:  # of a backward that failed half-way the order is not known
            seen = completed_order(self._ready, num_parameters=len(self._parameters))
            self._replan(broadcast_json(self._comm, seen))
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
        """Does nothing: `step` has updated all parameters."""

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """See `Updater.observe_reductions`."""
        if self._pipeline is not None:
            self._pipeline.observer = observer

    def state(self) -> dict[str, Any]:
        """See `Updater.state`: loss scale, order of the gradients, choice of algorithms."""
        state = {"loss_scale": asdict(self._scale), "order": self._order}
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
        """See `Updater.load_state`. tensors: of the shapes and dtypes that `state_tensors` had in the saved run. Raises
        UsageError between `backward` and `step`."""
        if any(self._placed):
            raise UsageError("load_state was called between backward and step(): call it between steps")
        saved = state["loss_scale"]
        self._scale = self._scale.continued(saved)
        # Restore algorithms and buckets: the order of a sum depends on the algorithm, and may depend on an element's
        # place in its bucket.
        other_choice = False
        if self._chooser is not None and "reduction" in state:
            before = self._chooser.choice_state()
            self._bucket_bytes = self._chooser.recall(state["reduction"])
            other_choice = self._chooser.choice_state() != before
        self._replan(state.get("order"), other_choice=other_choice)
        self._reset()
        self._reducer.load_state(tensors or {}, shapes)
        if self._scale.value != saved["value"]:
            # Residuals are in the unit of the buckets: gradients times the loss scale at the time of saving.
            self._reducer.settle(applied=False, rescale=self._scale.value / saved["value"])

    def close(self) -> bool:
        """See `Updater.close`. Returns False if a reduction hangs; it still uses the reducer's memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        ended = self._pipeline is None or self._pipeline.close()
        if not self._closed:
            self._memory.leave()
        self.step_watch = None
        self._closed = True
        return ended

    # ------------------------------------------------------------------ implementation

    def _buckets_in_order(self) -> tuple[Bucket, ...]:
        return plan_buckets(self._specs, bucket_bytes=self._bucket_bytes, order=self._order)

    def _lay_out(self, buckets: tuple[Bucket, ...]) -> GradientMemory:
        """Returns memory for `buckets`. Collective."""
        buffers = self._reducer.plan(buckets, device=self._device)
        self._squares = GradientSquares(buckets, buffers)
        self._milestones = milestones(buckets, least_elems=_MIN_ANNOUNCED_ELEMS) if self._announces else {}
        return GradientMemory(self._parameters, buckets=buckets, buffers=buffers)

    def _replan(self, order: Sequence[int] | None, *, other_choice: bool = False) -> None:
        """Plans buckets in another order, or for other reductions. Collective; `order` is the same on every rank."""
        self._order = None if order is None else list(order)
        buckets = self._buckets_in_order()
        if other_choice or buckets != self._memory.buckets:
            self._memory = self._lay_out(buckets)

    def _reset(self) -> None:
        self._waiting_for = [len(bucket.slots) for bucket in self.buckets]
        self._placed = [False] * len(self._parameters)
        self._ready: list[int] = []
        self._next_bucket = 0
        self._clock.reset()
        # Factor for gradients of a plain `loss.backward()`, applied when they are written into the bucket. It must be
        # applied before the reduction, as the sum of many ranks' gradients near 1024 overflows float16.
        self._unsent_factor = self._scale.value / self._comm.num_ranks
        unscale = 1.0 / self._scale.value
        unscaled = self._distributed and self._reducer.begin_step(unscale) == unscale
        self._summed_scale = 1.0 if unscaled else self._scale.value

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            if self._syncing:
                self._ready.append(index)
                if self._put(index) == 0:
                    self._send_complete_buckets()
                elif (milestone := self._milestones.get(index)) is not None:
                    self._announce_filled(milestone)

        return gradient_is_ready

    def _put(self, index: int) -> int:
        """Writes a gradient into its bucket, once a step. Returns how many gradients the bucket still waits for."""
        if self._placed[index]:
            raise UsageError(
                "backward ran twice before step(): the first gradients are being reduced already. Wrap all but "
                "the last backward of a step in `with updater.no_sync():`"
            )
        bucket = self._memory.put(index, factor=self._unsent_factor)
        self._placed[index] = True  # not before: if memory was short in `put`, `step` writes it again
        self._waiting_for[bucket] -= 1
        return self._waiting_for[bucket]

    def _announce_filled(self, milestone: Milestone) -> None:
        """Announces a filled part of a bucket; does nothing if gradients became ready in another order."""
        if all(self._placed[index] for index in milestone.parameters):
            self._reducer.filled(milestone.bucket, milestone.num_elems)

    def _send_complete_buckets(self) -> None:
        """Submits full buckets in the order of the plan, which is the same on every rank, as reductions must match."""
        while self._next_bucket < len(self._waiting_for) and self._waiting_for[self._next_bucket] == 0:
            self._memory.complete(self._next_bucket)
            self._clock.filled()
            if self._announces:
                self._reducer.filled(self._next_bucket, self.buckets[self._next_bucket].numel)
            if self._pipeline is not None:
                self._pipeline.submit(self._next_bucket)
            self._next_bucket += 1

    def _put_rest(self) -> None:
        """Writes the gradients that no hook has written: of unused parameters, or all on ranks without samples."""
        if not all(self._placed):
            for index, placed in enumerate(self._placed):
                if not placed:
                    self._put(index)

    def _finish_reduction(self, numbers: Numbers) -> tuple[Reduced, InFlight]:
        """Submits the remaining buckets and waits."""
        if self._pipeline is None:  # one rank: its gradients are the sums
            self._send_complete_buckets()
            return result_of(all_reduced(self._squares, numbers, comm=self._comm)), InFlight(0.0, 0.0)
        finish = functools.partial(self._reducer.finish, numbers, comm=self._comm)
        # With overlap a reduction may have begun on one rank and not on another: then all ranks begin afterwards.
        finishing = None if self._overlap else finish()
        self._send_complete_buckets()
        in_flight = self._pipeline.wait()
        return result_of(finishing or finish()), in_flight

    def _take_gradients(self, norm: float) -> bool:
        """Clips and unscales the sums. Returns True if every parameter's dtype can hold its gradient."""
        clip = self._clip_norm / norm if self._clip_norm is not None and norm > self._clip_norm else 1.0
        self._memory.scale(clip / self._summed_scale)
        return self._memory.copy_out()

    def _numbers(self, sums: Mapping[str, float]) -> Numbers:
        """Returns the numbers that are summed in addition to the gradients, shape (n,): 1 if this is rank 0 and it has
        seen for the first time in what order gradients become ready, else 0; then the caller's, sorted by name."""
        news = self._distributed and self._order is None and self._comm.rank == 0 and bool(self._ready)
        return np.array([news, *(float(sums[k]) for k in sorted(sums))], dtype=np.float64)

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _check_parameters(self) -> None:
        """Raises UsageError unless the optimizer's trainable parameters are those that the buckets were planned for."""
        now = self._trainable()
        if len(now) != len(self._parameters) or any(
            a is not b for a, b in zip(now, self._parameters, strict=True)
        ):
            raise UsageError(
                f"the optimizer has {len(now)} trainable parameters now, {len(self._parameters)} when the updater was "
                "made: new ones would not be reduced and the ranks would drift apart. Close this updater and make "
                "a new one after freezing, unfreezing or adding parameters"
            )
