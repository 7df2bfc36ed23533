"""The updater for optimizers that accept only sparse gradients: it gathers indices and values."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, final

import torch

from hpctrain.comm import Collective
from hpctrain.distributed import all_reduce_sparse
from hpctrain.errors import GradientsInUse, UsageError
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor
from hpctrain.reduce.contract.step_end import check_divide_by, clip_factor, divisor, square_of_all
from hpctrain.reduce.contract.updater import Accepts, ReductionObserver, StepOutcome
from hpctrain.reduce.data_parallel.gradient_buckets import PendingGradient, asks_for_gradients, ran_twice
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.parameter_checks import (
    ParameterChecks,
    check_open,
    check_options,
    trainable,
)
from hpctrain.reduce.watch.step_watch import Watched, watched


@final
class SparseUpdater(Watched):
    """`DistributedOptimizer` whose `step` sums sparse gradients (COO) over the ranks.

    Each rank gets the entries of all ranks in rank order, and adds up those with the same index. Nothing is sent
    before `step`. A plain `loss.backward()` has weight 1/num_ranks. Between backward and `step`, `.grad` cannot be
    used, as for `AllReduceUpdater`. The constructor is not collective.

    Args:
        optimizer: Optimizer whose parameters all have sparse gradients, such as SparseAdam; the same on every rank.
        comm: Communicator of all ranks.
        loss_scale: Loss scale; None means 1.
        clip_norm: See `AllReduceUpdater`.
        model: See `AllReduceUpdater`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._comm = comm
        self._clip_norm = clip_norm
        self._scale = loss_scale or LossScale()
        self._parameters = trainable(optimizer)
        check_options(self._parameters, clip_norm=clip_norm)
        self._checks = ParameterChecks(optimizer, self._parameters, model=model)
        self._pending = [PendingGradient(parameter) for parameter in self._parameters]
        self._held: dict[int, torch.Tensor] = {}
        self._syncing = True
        self._closed = False
        self._synchronized = False
        self._weighted = False
        # Factor for gradients of a plain `loss.backward()`: see `AllReduceUpdater`.
        self._factor = self._scale.value / comm.num_ranks
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
    def param_groups(self) -> list[dict[str, Any]]:
        """See `AllReduceUpdater.param_groups`."""
        if asks_for_gradients(sys._getframe(1)):
            self.synchronize()
        return self._optimizer.param_groups

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        """See `DistributedOptimizer.backward`. Raises UsageError for a loss that does not have exactly one element."""
        scaled = self._scale.scaled(loss, weight=weight)
        self._factor, self._weighted = 1.0, True
        if last:
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
        """See `DistributedOptimizer.zero_grad`. Not collective."""
        self._optimizer.zero_grad(set_to_none=True)
        self._held.clear()
        self._synchronized = self._weighted = False
        self._factor = self._scale.value / self._comm.num_ranks

    def synchronize(self) -> None:
        """See `AllReduceUpdater.synchronize`. Collective."""
        if not self._synchronized:
            self._synchronize()
            if self.step_watch is not None and not math.isfinite(self._square()):
                self.step_watch.drop()

    def _synchronize(self) -> None:
        if self._synchronized:
            return
        check_open(closed=self._closed)
        self._checks.check()
        for parameter, total in zip(self._parameters, self._sums(), strict=True):
            parameter.grad = None if total is None else total / self._scale.value
        self._held.clear()
        self._synchronized = True

    @watched
    def step(
        self,
        *,
        sums: Mapping[str, float] | None = None,
        accepts: Accepts | None = None,
        divide_by: str | None = None,
    ) -> StepOutcome:
        """See `DistributedOptimizer.step`.

        Raises UsageError also if the updater is closed, if parameters or gradients were changed, and for a dense
        gradient.
        """
        plain = not self._weighted and any(p.grad is not None for p in self._parameters)
        check_divide_by(divide_by, sums=sums, plain=plain)
        started = time.perf_counter()
        self._synchronize()
        names = sorted(sums or {})
        found = torch.tensor([float((sums or {})[name]) for name in names], dtype=torch.float64)
        if self._comm.num_ranks > 1 and names:
            self._comm.all_reduce(found)
        totals = dict(zip(names, found.tolist(), strict=True))
        waited_s = time.perf_counter() - started
        square = self._square()
        total = divisor(totals, divide_by=divide_by)
        norm = math.sqrt(square) / total if square >= 0 and total else math.nan
        finite = math.isfinite(norm)
        accepted = (accepts is None or accepts(norm if finite else math.nan, totals)) and total != 0
        applied = accepted and finite
        if applied:
            factor = clip_factor(norm, clip_norm=self._clip_norm) / total
            if factor != 1.0:
                for parameter in self._parameters:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad * factor
            self._optimizer.step()
        used_scale = self._scale.value
        if accepted:
            self._scale = self._scale.after_good_step() if applied else self._scale.after_overflow()
        self.zero_grad()
        self._scale.check(used_value=used_scale)
        return StepOutcome(
            applied=applied,
            grad_norm=norm if applied or (finite and not accepted) else math.nan,
            loss_scale=used_scale,
            sums=totals,
            sync_s=waited_s,
            exposed_sync_s=waited_s,
            update_s=time.perf_counter() - started - waited_s,
        )

    def wait_for_parameters(self) -> None:
        """Does nothing: `step` has already updated all parameters."""

    def observe_reductions(self, observer: ReductionObserver | None) -> None:
        """Does nothing: there are no buckets."""

    def state(self) -> dict[str, Any]:
        """See `DistributedOptimizer.state`: the loss scale, in the form of `AllReduceUpdater`."""
        return {"loss_scale": asdict(self._scale), "order": None}

    def state_tensors(self) -> list[StateTensor]:
        return []

    def rows_to_load(self, state: Mapping[str, Any], shapes: Shapes) -> dict[str, list[range]]:
        return {}

    def load_state(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """See `DistributedOptimizer.load_state`. Raises UsageError if it is called between `backward` and `step`.

        tensors: tensors that another updater has saved; they are not used.
        """
        if self._held:
            raise UsageError("load_state was called between backward and step(): call it between steps")
        self._scale = self._scale.continued(state["loss_scale"])
        self.zero_grad()

    def close(self) -> bool:
        """See `DistributedOptimizer.close`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for index, gradient in self._held.items():
            if self._parameters[index].grad is self._pending[index]:
                self._parameters[index].grad = gradient
        self._held.clear()
        self.step_watch = None
        self._closed = True
        return True

    # ------------------------------------------------------------------ implementation

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            if self._held and any(self._parameters[i].grad is not self._pending[i] for i in self._held):
                # Dropped by the model's `zero_grad`, unless some are still there.
                if any(p.grad is pending for p, pending in zip(self._parameters, self._pending, strict=True)):
                    raise ran_twice()
                self._held.clear()
            self._synchronized = False
            if self._syncing and parameter.grad is not None:
                self._held[index] = parameter.grad
                parameter.grad = self._pending[index]

        return gradient_is_ready

    def _square(self) -> float:
        """Returns the sum of squares of the gradients; negative or not finite if they are not finite."""
        gradients = [p.grad.coalesce() for p in self._parameters if p.grad is not None]
        return square_of_all(gradient.values() for gradient in gradients)

    def _sums(self) -> list[torch.Tensor | None]:
        """Returns the sum of each parameter's gradient over the ranks; None for one that no rank has. Collective."""
        gradients: list[torch.Tensor | None] = []
        for index, parameter in enumerate(self._parameters):
            if index in self._held and parameter.grad is not self._pending[index]:
                if parameter.grad is not None:
                    raise GradientsInUse(self._pending[index].words)
                gradients.append(None)
                continue
            gradients.append(self._held.get(index, parameter.grad))
        for index, gradient in enumerate(gradients):
            if gradient is not None and not gradient.is_sparse:
                raise UsageError(
                    f"parameter {index} of {type(self._optimizer).__name__} has a dense gradient: it takes sparse "
                    "ones, as of Embedding(sparse=True). Give dense parameters to another optimizer, with an updater "
                    "of its own"
                )
        gradients = [None if g is None else g.detach() * self._factor for g in gradients]
        if self._comm.num_ranks == 1:
            return gradients
        # For each parameter: how many ranks have a gradient, and the sum of their numbers of sparse dimensions.
        dims = torch.tensor([[g is not None, g.sparse_dim() if g is not None else 0] for g in gradients])
        self._comm.all_reduce(flat := dims.to(torch.int64).view(-1))
        return [
            None if count == 0 else self._sum(parameter, gradient, sparse_dim=total // count)
            for parameter, gradient, (count, total) in zip(
                self._parameters, gradients, flat.view(-1, 2).tolist(), strict=True
            )
        ]

    def _sum(
        self, parameter: torch.Tensor, gradient: torch.Tensor | None, *, sparse_dim: int
    ) -> torch.Tensor:
        if gradient is None:
            shape = parameter.shape
            gradient = torch.sparse_coo_tensor(
                torch.empty(sparse_dim, 0, dtype=torch.int64),
                torch.empty(0, *shape[sparse_dim:], dtype=parameter.dtype),
                shape,
                device=parameter.device,
                check_invariants=True,
            )
        return all_reduce_sparse(self._comm, gradient, op="sum")
