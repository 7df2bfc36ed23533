"""What forward and backward of a model sharded by FSDP2 leave on a rank: whole parameters, whole gradients, and the
state of a pass that has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from hpctrain.distributed.sharded_tensors import shard_of

_KEPT = "_hpctrain_kept_whole"
# Of a sharded model; and of a module whose gradients `sum_gradients_by` sums.
_FACTOR, SUMMED_HERE = "_hpctrain_gradient_factor", "_hpctrain_sums_gradients"


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the modules of `model` to which `fully_shard` was applied, in the order of `modules`."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def gradient_factor(model: nn.Module) -> float:
    """Returns by what the gradients of `model` are multiplied before they are summed."""
    return float(getattr(model, _FACTOR, 1.0))


def free_after_evaluation(model: nn.Module) -> None:
    """Has a forward of `model` without gradients end with this rank's parts only, except within `kept_whole`.

    FSDP2 keeps some parameters whole after forward, for backward. Without one, what the program then does to
    `model.parameters()` would be done to these copies, and be lost.
    """
    modules = sharded_modules(model)

    def free(*_: Any) -> None:
        if not torch.is_grad_enabled() and not getattr(model, _KEPT, False):
            _reshard(modules)

    model.register_forward_hook(free)


@contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """Within it forwards without gradients, one after another, gather only once what FSDP2 keeps whole after forward.

    The parameters must not change within it. At its end this rank has only its parts. It does nothing for a model
    without sharded parameters. Every rank enters it together; it does not communicate.
    """
    if shard_of(model) != "parameters":
        yield
        return
    setattr(model, _KEPT, True)
    try:
        yield
    finally:
        setattr(model, _KEPT, False)
        _reshard(sharded_modules(model))


@final
class ShardedPasses:
    """The forwards and backwards of `model`, to which `fully_shard` was applied, from one step to the next.

    Every rank calls each method equally often; only `sum_whole_gradients` communicates. plain_factor: by which the
    gradients of a backward outside of `weighted` are multiplied, until `close`.
    """

    def __init__(self, model: nn.Module, *, plain_factor: float = 1.0) -> None:
        self._root: Any = model
        self._modules = sharded_modules(model)
        self._sums = True
        self._may_hold_gradients = False
        self._owners: list[nn.Module | torch.optim.Optimizer] = []
        self._plain_factor = plain_factor
        self._set_factor(plain_factor)

    @contextmanager
    def weighted(self) -> Iterator[None]:
        """Within it the gradients of a backward are summed as they are."""
        self._set_factor(1.0)
        try:
            yield
        finally:
            self._set_factor(self._plain_factor)

    def drop_with(self, owner: nn.Module | torch.optim.Optimizer) -> None:
        """Has `owner.zero_grad` drop whole gradients too, until `close`: those of `without_sums` would be added to a
        later step."""
        zero_grad = owner.zero_grad

        def zero_all(*arguments: Any, **options: Any) -> None:
            zero_grad(*arguments, **options)
            self.drop_gradients()

        owner.zero_grad = zero_all  # type: ignore[method-assign]
        self._owners.append(owner)

    def close(self) -> None:
        self._set_factor(1.0)
        while self._owners:
            vars(self._owners.pop()).pop("zero_grad", None)

    def _set_factor(self, factor: float) -> None:
        setattr(self._root, _FACTOR, factor)
        for module in self._modules:
            if not getattr(module, SUMMED_HERE, False):
                module.set_gradient_divide_factor(1.0 / factor)

    @property
    def backward_has_failed(self) -> bool:
        """True if a backward raised an error, and neither `drop_gradients` nor `end_step` was called since."""
        # FSDP2 sets it when backward begins, and clears it at its end.
        return any(state._state_ctx.post_backward_final_callback_queued for state in self._states())

    @property
    def _forward_has_failed(self) -> bool:
        return any(state._state_ctx.iter_forward_root is not None for state in self._states())

    @contextmanager
    def without_sums(self) -> Iterator[None]:
        """Within it each rank adds up whole gradients in backward, until the next backward outside."""
        before, self._sums = self._sums, False
        self._may_hold_gradients = True
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sums = before
            self._root.set_requires_gradient_sync(before)

    def sum_whole_gradients(self) -> None:
        """Sums over the ranks what no backward has summed since `without_sums`. Collective.

        What a backward that has failed left is not summed.
        """
        if self._may_hold_gradients and not self.backward_has_failed:
            self._root.set_requires_gradient_sync(True)
            # As PyTorch's own pipelines end a step: it sums and shards what is still whole.
            self._root._get_fsdp_state()._root_post_backward_final_callback()
            self._root.set_requires_gradient_sync(self._sums)
        self._may_hold_gradients = False

    def drop_gradients(self) -> None:
        """Drops whole gradients, which `optimizer.zero_grad` does not know, and what a failed pass has left.

        Otherwise parameters that are whole stay so: a backward may follow that needs them.
        """
        if self.backward_has_failed or self._forward_has_failed:
            self._reset()
        for state in self._states():
            for group in state._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    # From PyTorch 2.15 on a property, without a setter, that reads the gradient of the next line.
                    if "unsharded_accumulated_grad" in vars(parameter):
                        parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
        self._may_hold_gradients = False

    def end_step(self) -> None:
        """Frees what is whole of parameters that `step` has updated, and forgets all passes before it."""
        self._reset()
        _reshard(self._modules)

    def _reset(self) -> None:
        for module, state in zip(self._modules, self._states(), strict=True):
            if state._is_root:
                module.reset_iter_state()

    def _states(self) -> list[Any]:
        return [module._get_fsdp_state() for module in self._modules]


def _reshard(modules: list[Any]) -> None:
    for module in modules:
        module.reshard()
