"""Updates parameters on a CPU in one pass over memory: the unscaled and clipped gradient, the moments, the parameter.

PyTorch needs a pass over the gradients for the factor, and a second one over everything for its fused optimizer, and
spends some 0.2 ms per step in Python before the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, final

import torch
from torch.autograd import profiler
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from hpctrain.comm import Collective, is_true_everywhere
from hpctrain.errors import UsageError

# Interface version of `_one_pass.c`; increase it here and there together.
VERSION = 1


def _load() -> Any:
    try:
        from hpctrain.reduce.data_parallel import _one_pass as module
    except ImportError:
        return None
    # A stale build may have another interface: do not use it.
    return module if getattr(module, "VERSION", 0) == VERSION else None


_COMPILED = _load()


_KIND = attrgetter("dtype", "is_cpu", "layout")
_KINDS = {(torch.float32, True, torch.strided)}

# A call of a compiled function for a group: numbers of its parameters, the sign of its gradients, and its settings.
Call = tuple[list[int], float, tuple[float, ...]]


@final
class OptimizerStep:
    """Multiplies an optimizer's gradients by a factor and steps the optimizer, in one pass over memory if possible.

    This is possible for Adam, AdamW and SGD with `fused=True` and float32 parameters on a CPU, if every rank has one
    thread and the compiled functions. Otherwise, and in the first step, which creates the moments, PyTorch's optimizer
    makes the step. The choice does not depend on anything that only one rank may do, such as profiling, so that all
    ranks compute the same bits. The result differs from that of PyTorch's fused kernel by rounding.

    The constructor is collective.

    Args:
        own_hooks: Handles of the hooks of `keep_layouts`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, comm: Collective, own_hooks: Sequence[RemovableHandle]
    ) -> None:
        self._optimizer = optimizer
        self._own_hooks = {handle.id for handle in own_hooks}
        self._called_step: object = None  # a scheduler's replacement for `step` that was called once
        self._function: Callable[..., None] | None = None
        kind = type(optimizer)
        if kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            can = _COMPILED is not None and torch.get_num_threads() == 1
            if is_true_everywhere(comm, can) and _COMPILED is not None:
                self._function = _COMPILED.sgd if kind is torch.optim.SGD else _COMPILED.adam

    def step(self, factor: float, *, scale: Callable[[float], None]) -> None:
        """Steps the optimizer with its gradients times `factor`. Not collective.

        Args:
            factor: The factor for each `.grad`.
            scale: A function that multiplies all gradients by its argument, in place. It is called if PyTorch's
                optimizer, or a hook of the script, reads the gradients.
        """
        optimizer = self._optimizer
        calls = _collect(optimizer) if self._function is not None and not self._is_replaced() else None
        if calls is None:
            scale(factor)
            self._move_own_hooks_last()
            optimizer.step()
        elif not self._is_observed():
            self._run(calls, factor)
        else:
            scale(factor)
            self._step_observed()

    def _run(self, calls: Sequence[Call], factor: float) -> None:
        assert self._function is not None
        for numbers, sign, settings in calls:
            self._function(numbers, sign * factor, *settings)

    def _is_replaced(self) -> bool:
        """Returns True if the script has replaced the optimizer's `step`, so that PyTorch's must be called.

        A learning rate scheduler replaces `step` too, only to know that it was called before the scheduler's `step`.
        So the first step under a scheduler goes through PyTorch's, later ones need not.
        """
        step = vars(self._optimizer).get("step")
        if step is None or step is self._called_step:
            return False
        if getattr(step, "_wrapped_by_lr_sched", False) and step.__wrapped__ is type(self._optimizer).step:
            self._called_step = step
        return True

    def _move_own_hooks_last(self) -> None:
        """Makes the hooks of `keep_layouts` run last: a hook of the script may set gradients of another layout."""
        before: Any = getattr(self._optimizer, "_optimizer_step_pre_hooks", {})
        if len(before) > 1:
            for key in self._own_hooks & before.keys():
                before.move_to_end(key)

    def _is_observed(self) -> bool:
        """Returns True if hooks of the script or a profiler see the steps of the optimizer."""
        before = self._optimizer._optimizer_step_pre_hooks
        return bool(
            profiler._is_profiler_enabled
            or before.keys() - self._own_hooks
            or self._optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )

    def _step_observed(self) -> None:
        """Steps with gradients that are scaled already, and calls the hooks as PyTorch's `step` does."""
        optimizer = self._optimizer
        with profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            self._move_own_hooks_last()
            before = optimizer._optimizer_step_pre_hooks
            for hook in (*torch_optimizer._global_optimizer_pre_hooks.values(), *before.values()):
                hook(optimizer, (), {})
            calls = _collect(optimizer)
            if calls is None:
                raise UsageError(
                    f"a hook before {type(optimizer).__name__}.step() has changed the dtype, the device or the "
                    "layout of a gradient or a moment: leave them as they are, or make the optimizer without fused=True"
                )
            self._run(calls, 1.0)
            after = optimizer._optimizer_step_post_hooks
            for hook in (*after.values(), *torch_optimizer._global_optimizer_post_hooks.values()):
                hook(optimizer, (), {})


def _collect(optimizer: torch.optim.Optimizer) -> list[Call] | None:
    """Returns the calls that step the optimizer; None if PyTorch must make the step."""
    is_sgd = type(optimizer) is torch.optim.SGD
    settings_of, numbers_of = (_sgd_settings, _sgd_numbers) if is_sgd else (_adam_settings, _adam_numbers)
    calls: list[Call] = []
    for group in optimizer.param_groups:
        settings = settings_of(optimizer, group)
        if not _is_plain(group, settings):
            return None
        numbers: list[int] = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            found = numbers_of(group, parameter, optimizer.state.get(parameter) or {})
            if found is None:
                return None
            numbers += found
        calls.append((numbers, -1.0 if group["maximize"] else 1.0, settings))
    return calls


def _adam_settings(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[Any, ...]:
    decoupled = type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    return group["lr"], *group["betas"], group["eps"], group["weight_decay"], decoupled


def _adam_numbers(
    group: Mapping[str, Any], parameter: torch.Tensor, state: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Returns the numbers of a parameter for the compiled `adam`; None if PyTorch must make the step."""
    gradient, mean, square, step = (
        parameter.grad,
        state.get("exp_avg"),
        state.get("exp_avg_sq"),
        state.get("step"),
    )
    if gradient is None or mean is None or square is None or not isinstance(step, torch.Tensor):
        return None
    if (
        step.dtype is not torch.float32
        or not step.is_cpu
        or not _are_alike(parameter, gradient, mean, square)
    ):
        return None
    return (
        parameter.data_ptr(), gradient.data_ptr(), mean.data_ptr(), square.data_ptr(), step.data_ptr(),
        parameter.numel(),
    )  # fmt: skip


def _sgd_settings(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[Any, ...]:
    return group["lr"], group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"]


def _sgd_numbers(
    group: Mapping[str, Any], parameter: torch.Tensor, state: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Returns the numbers of a parameter for the compiled `sgd`; None if PyTorch must make the step."""
    gradient = parameter.grad
    velocity = state.get("momentum_buffer") if group["momentum"] else gradient  # not used without momentum
    if gradient is None or velocity is None or not _are_alike(parameter, gradient, velocity):
        return None
    of_velocity = velocity.data_ptr() if group["momentum"] else 0
    return parameter.data_ptr(), gradient.data_ptr(), of_velocity, parameter.numel()


def _is_plain(group: Mapping[str, Any], settings: Sequence[object]) -> bool:
    """Returns True if a group is fused, without options that the compiled functions lack; settings are numbers."""
    return (
        group.get("fused") is True
        and not group.get("capturable")
        and not group.get("amsgrad")
        and all(isinstance(value, float | int) for value in settings)
    )


def _are_alike(*tensors: torch.Tensor) -> bool:
    """Returns True if all tensors are float32, in host memory, and of the same layout."""
    # No generators: this runs for each parameter in each step.
    return set(map(_KIND, tensors)) == _KINDS and len(set(map(torch.Tensor.stride, tensors))) == 1
