"""The base class of all updaters: the order of actions in a step, the loss scale, and the state in a checkpoint."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_reducer import KeepsState, Shapes, StateTensor
from hpctrain.reduce.contract.step_end import check_divide_by, clip_factor, divisor
from hpctrain.reduce.contract.updater import Accepts, BackwardTimes, ReductionObserver, StepOutcome
from hpctrain.reduce.data_parallel.bucket_filling import BackwardClock
from hpctrain.reduce.data_parallel.fused_kernels import keep_layouts
from hpctrain.reduce.data_parallel.gradient_memory import asks_for_gradients, refuse_grad_scaler
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.one_pass import OptimizerStep
from hpctrain.reduce.data_parallel.parameter_checks import check_open, trainable
from hpctrain.reduce.watch.step_watch import Watched, watched


@dataclass(slots=True, kw_only=True)
class StepSums:
    """The sums of a step over all ranks, and the times of the step on this rank.

    norm_square: sum of the squares of all summed gradients, which include the factor `scale`; negative or not finite
    if a gradient is not finite.
    totals: sums over the ranks of the numbers that the caller passed to `step`.
    scale: factor by which the summed gradients are larger than the true gradients, such as the loss scale.
    order_is_new: True if rank 0 has just learned in which order gradients become ready.
    not_applicable: error message with which an accepted step fails; "" if the step can be applied.
    update_from: time at which the update began, in seconds of `time.perf_counter`; used if `update_s` is None.
    The other fields are those of `StepOutcome`.
    """

    norm_square: float
    totals: dict[str, float]
    scale: float
    order_is_new: bool = False
    not_applicable: str = ""
    update_from: float
    sync_s: float
    hidden_sync_s: float = 0.0
    exposed_sync_s: float
    update_s: float | None = None
    times: BackwardTimes | None = None


class UpdaterBase(Watched, ABC):
    """Base class of the updaters. A subclass defines how gradients are summed and how parameters are updated.

    The constructor is collective. The constructor of a subclass calls `_begin_step` once the attributes that its
    `_begin_step` uses are set.

    reducer: object that keeps tensors for a checkpoint, such as residuals of error feedback; None if nothing is kept.
    wire: wire format of the gradients, since `divide_by` cannot be used with some wire formats; None if all values are
    sent unchanged.
    plain_weight: weight of a plain `loss.backward()`; None: 1 / (number of ranks of `comm`).
    """

    # Whether `synchronize` puts the sums of all gradients into `.grad`, as a GradScaler needs.
    _gives_sums: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        loss_scale: LossScale,
        clip_norm: float | None,
        reducer: KeepsState | None = None,
        wire: str | None = None,
        plain_weight: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._plain_weight = plain_weight
        self._comm = comm
        self._scale = loss_scale
        self._clip_norm = clip_norm
        self._state_keeper = reducer
        self._wire = wire
        self._parameters = trainable(optimizer)
        self._clock = BackwardClock()
        self._syncing = True
        self._closed = False
        self._hooks: list[RemovableHandle] = keep_layouts(optimizer)
        self._optimizer_step = OptimizerStep(optimizer, comm=comm, own_hooks=self._hooks)

    # ------------------------------------------------------------------ interface of the training loop

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer. Checkpoints save the state of this optimizer; learning rate schedulers need it too."""
        return self._optimizer

    @property
    def loss_scale(self) -> LossScale:
        return self._scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's `param_groups`, for scripts that set the learning rate there.

        If a GradScaler reads `param_groups`, `synchronize` is called first, so that the GradScaler finds summed
        gradients. Raises UsageError for a GradScaler if each rank has only a part of the sums.
        """
        caller = sys._getframe(1)
        if not self._gives_sums:
            refuse_grad_scaler(caller)
        elif asks_for_gradients(caller):
            self.synchronize()
        return self._optimizer.param_groups

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

    def zero_grad(self) -> None:
        """See `DistributedOptimizer.zero_grad`. The signature is that of the optimizer's own method.

        Collective between backward and `step`, since the call then waits for the sums that have started.
        """
        self._drop_gradients()
        if self._has_begun:
            self._abandon()
        else:
            self._unsent_factor, self._weighted = self._plain_factor(), False

    @abstractmethod
    def synchronize(self) -> None:
        """Completes the sums after backward. Raises UsageError if no rank has all sums."""

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
        check_open(closed=self._closed)
        check_divide_by(
            divide_by, sums=sums, plain=self._is_plain(), wire=None if self.sums_to_one else self._wire
        )
        summed = self._sum(sums or {})
        total = divisor(summed.totals, divide_by=divide_by)
        square, scale = summed.norm_square, summed.scale * total
        norm = math.sqrt(square) / scale if square >= 0 and total else math.nan
        finite = math.isfinite(norm)
        accepted = (accepts is None or accepts(norm if finite else math.nan, summed.totals)) and total != 0
        if accepted and summed.not_applicable:
            self._end_step(summed, applied=False, accepted=False, rescale=1.0)
            raise UsageError(summed.not_applicable, agreed=True)
        applied = accepted and finite
        if applied:
            applied = self._update(clip_factor(norm, clip_norm=self._clip_norm) / scale, summed)
        used_scale = self._scale.value
        if accepted:
            self._scale = self._scale.after_good_step() if applied else self._scale.after_overflow()
        self._end_step(summed, applied=applied, accepted=accepted, rescale=self._scale.value / used_scale)
        self._scale.check(used_value=used_scale)
        update_s = summed.update_s
        return StepOutcome(
            applied=applied,
            grad_norm=norm if applied or (finite and not accepted) else math.nan,
            loss_scale=used_scale,
            sums=summed.totals,
            sync_s=summed.sync_s,
            hidden_sync_s=summed.hidden_sync_s,
            exposed_sync_s=summed.exposed_sync_s,
            update_s=time.perf_counter() - summed.update_from if update_s is None else update_s,
            times=summed.times,
        )

    def wait_for_parameters(self) -> None:
        """Does nothing, since all parameters are complete when `step` returns. A subclass may override it."""

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """Does nothing: there are no buckets whose reduction could be observed."""

    def state(self) -> dict[str, Any]:
        """See `DistributedOptimizer.state`: the loss scale, in the form that every updater loads."""
        return {"loss_scale": asdict(self._scale), "order": None}

    def state_tensors(self) -> list[StateTensor]:
        """See `DistributedOptimizer.state_tensors`: the residuals of error feedback, if any."""
        return self._state_keeper.state() if self._state_keeper is not None else []

    def prepare_to_load(self, state: Mapping[str, Any]) -> None:
        """Does nothing, since measurements do not choose the reduction. A subclass may override it."""

    def rows_to_load(self, state: Mapping[str, Any], shapes: Shapes) -> dict[str, list[range]]:
        return self._state_keeper.rows_to_load(shapes) if self._state_keeper is not None else {}

    def load_state(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """See `DistributedOptimizer.load_state`. Raises UsageError between `backward` and `step`.

        tensors: saved tensors, with the shapes and dtypes that `state_tensors` had in the saved run. Tensors of another
        kind of updater or wire format are ignored.
        """
        self.check_between_steps()
        self.prepare_to_load(state)
        self.wait_for_parameters()
        saved = state["loss_scale"]
        self._scale = self._scale.continued(saved)
        self._plan_as_saved(state)
        self._begin_step()
        keeper = self._state_keeper
        if keeper is not None:
            keeper.load_state(tensors or {}, shapes)
            if self._scale.value != saved["value"]:
                # Residuals are in the unit of the buckets: gradients times the loss scale at the time of saving.
                keeper.end_step(applied=False, rescale=self._scale.value / saved["value"])

    def check_between_steps(self) -> None:
        """Raises UsageError between `backward` and `step`, when no state can be loaded."""
        if self._has_begun:
            raise UsageError("load_state was called between backward and step(): call it between steps")

    def close(self) -> bool:
        """See `DistributedOptimizer.close`. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            return self._release()
        finally:
            self.step_watch = None
            self._closed = True

    # ------------------------------------------------------------------ what subclasses add

    @abstractmethod
    def _sum(self, sums: Mapping[str, float]) -> StepSums:
        """Completes the sums of the gradients, and sums the numbers in `sums` over the ranks. Collective."""

    @abstractmethod
    def _update(self, factor: float, summed: StepSums) -> bool:
        """Multiplies the summed gradients by `factor` and steps the optimizer; may change the times in `summed`.

        Returns False, with the parameters unchanged, if a gradient does not fit into the dtype of its parameter.
        """

    @abstractmethod
    def _end_step(self, summed: StepSums, *, applied: bool, accepted: bool, rescale: float) -> None:
        """Drops the gradients of the step, and prepares the next one. Collective.

        rescale: the next step's loss scale divided by this step's.
        """

    @abstractmethod
    def _release(self) -> bool:
        """Undoes what the updater has changed in optimizer and gradients, and ends the reductions.

        It may be called twice. Returns False if a reduction hangs.
        """

    @property
    def _has_begun(self) -> bool:
        """True if a gradient of this step is being summed, or is kept until it is summed."""
        return False

    def _is_plain(self) -> bool:
        """Returns True if a backward of this step ran outside of the updater, so that all ranks have equal weights."""
        return not self._weighted and any(p.grad is not None for p in self._parameters)

    def _plain_factor(self) -> float:
        """Returns the factor for gradients of a plain `loss.backward()`.

        The factor is applied before the sum, since the sum of many ranks' gradients near 1024 overflows float16.
        """
        if self._plain_weight is not None:
            return self._scale.value * self._plain_weight
        return self._scale.value / self._comm.num_ranks

    def _begin_step(self) -> None:
        self._weighted = False
        self._unsent_factor = self._plain_factor()
        self._clock.reset()

    def _drop_gradients(self) -> None:
        optimizer = self._optimizer
        if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
            optimizer.zero_grad(set_to_none=True)
            return
        # The same without PyTorch's profiling around it, which takes longer than the rest.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _abandon_dropped(self) -> None:
        """Abandons a step whose gradients the script has dropped, by `zero_grad` of the model or the optimizer."""
        if not self._has_begun:
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                return
        self._abandon()

    def _abandon(self) -> None:
        """Ends a step that is not applied because the script has dropped its gradients. May be collective."""

    def _plan_as_saved(self, state: Mapping[str, Any]) -> None:
        """Plans the buckets, if there are any, in the order of the saved run. Collective."""

    def _register_hooks(self, hook: Callable[[int], Callable[[torch.Tensor], None]]) -> None:
        """Registers, for each parameter, `hook(index)` as the hook that runs when its gradient is accumulated."""
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(hook(index))
            for index, parameter in enumerate(self._parameters)
        ]
