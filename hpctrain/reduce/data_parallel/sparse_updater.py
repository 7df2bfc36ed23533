"""The updater for optimizers that accept only sparse gradients. Gathers the indices and values of all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.distributed import all_reduce_sparse
from hpctrain.errors import GradientsInUse, UsageError
from hpctrain.reduce.contract.step_end import square_of_all
from hpctrain.reduce.data_parallel.gradient_memory import PendingGradient, ran_twice
from hpctrain.reduce.data_parallel.loss_scale import LossScale
from hpctrain.reduce.data_parallel.parameter_checks import (
    ParameterChecks,
    check_open,
    check_updater_options,
)
from hpctrain.reduce.data_parallel.updater_base import StepSums, UpdaterBase


@final
class SparseUpdater(UpdaterBase):
    """`DistributedOptimizer` whose `step` sums sparse gradients (COO) over the ranks.

    Each rank gets the entries of all ranks in rank order, and adds up entries with the same index. Nothing is sent
    before `step`. A plain `loss.backward()` has weight 1/num_ranks. Between backward and `step`, `.grad` cannot be
    used, as for `AllReduceUpdater`. The constructor is not collective.

    Args:
        optimizer: Optimizer whose parameters all have sparse gradients, such as SparseAdam; the same on every rank.
        comm: Communicator of all ranks.
        loss_scale: Loss scale; None means 1.
        clip_norm: See `AllReduceUpdater`.
        model: See `AllReduceUpdater`.
    """

    _gives_sums = True

    _synchronized: bool

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        super().__init__(optimizer, comm=comm, loss_scale=loss_scale or LossScale(), clip_norm=clip_norm)
        check_updater_options(self._parameters, clip_norm=clip_norm)
        self._checks = ParameterChecks(optimizer, self._parameters, model=model)
        self._pending = [PendingGradient(parameter) for parameter in self._parameters]
        self._held: dict[int, torch.Tensor] = {}
        self._begin_step()
        self._register_hooks(self._hook)

    def zero_grad(self) -> None:
        """See `DistributedOptimizer.zero_grad`. Not collective."""
        self._drop_gradients()
        self._begin_step()

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

    # ------------------------------------------------------------------ implementation

    def _sum(self, sums: Mapping[str, float]) -> StepSums:
        started = time.perf_counter()
        self._synchronize()
        names = sorted(sums)
        found = torch.tensor([float(sums[name]) for name in names], dtype=torch.float64)
        if self._comm.num_ranks > 1 and names:
            self._comm.all_reduce(found)
        ended = time.perf_counter()
        return StepSums(
            norm_square=self._square(),
            totals=dict(zip(names, found.tolist(), strict=True)),
            scale=1.0,
            update_from=ended,
            sync_s=ended - started,
            exposed_sync_s=ended - started,
        )

    def _update(self, factor: float, summed: StepSums) -> bool:
        if factor != 1.0:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * factor
        self._optimizer.step()
        return True

    def _end_step(self, summed: StepSums, *, applied: bool, accepted: bool, rescale: float) -> None:
        self.zero_grad()

    def _release(self) -> bool:
        for index, gradient in self._held.items():
            if self._parameters[index].grad is self._pending[index]:
                self._parameters[index].grad = gradient
        self._held.clear()
        return True

    @property
    def _has_begun(self) -> bool:
        return bool(self._held) or self._synchronized

    def _begin_step(self) -> None:
        super()._begin_step()
        self._held.clear()
        self._synchronized = False

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
        """Returns, for each parameter, the sum of its gradient over the ranks. Collective.

        The sum is None if no rank has a gradient.
        """
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
                    f"parameter {index} of {type(self._optimizer).__name__} has a dense gradient, but this optimizer "
                    "takes only sparse gradients, such as those of Embedding(sparse=True). Give dense parameters to "
                    "another optimizer, with an updater of its own"
                )
        gradients = [None if g is None else g.detach() * self._unsent_factor for g in gradients]
        if self._comm.num_ranks == 1:
            return gradients
        # For each parameter: how many ranks have a gradient, and the sum of their numbers of sparse dimensions.
        dims = torch.tensor([[g is not None, g.sparse_dim() if g is not None else 0] for g in gradients])
        self._comm.all_reduce(flat := dims.to(torch.int64).view(-1))
        return [
            None if count == 0 else self._sum_of(parameter, gradient, sparse_dim=total // count)
            for parameter, gradient, (count, total) in zip(
                self._parameters, gradients, flat.view(-1, 2).tolist(), strict=True
            )
        ]

    def _sum_of(
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
