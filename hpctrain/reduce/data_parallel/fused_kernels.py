"""PyTorch's fused optimizers, which update a parameter in one pass over memory: where they can be used, and how.

On CPUs the fused kernels read a parameter, its gradient and its moments as flat arrays, and do not compare their
strides (PyTorch 2.13). If these tensors have different layouts, the kernels combine elements that do not belong
together, without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hpctrain.distributed import is_sharded_tensor
from hpctrain.errors import UsageError

_ON_GPUS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_ON_CPUS = (*_ON_GPUS, torch.optim.Adagrad)
_OF_SHARDED_TENSORS = (torch.optim.Adam, torch.optim.AdamW)


def use_fused_kernels(optimizer: torch.optim.Optimizer) -> bool:
    """Sets `fused` in each parameter group for which PyTorch has a fused kernel. Returns True if there is such a group.

    A group stays as it is if the script has set `fused`, `foreach` or `differentiable`, or if the kernel does not
    support one of its parameters.

    The updated parameters differ from those of PyTorch's loop over tensors by about one rounding per operation. Not
    collective; the result is the same on all ranks if the optimizer is the same.
    """
    if type(optimizer) not in _ON_CPUS:  # a subclass may have a step of its own
        return False
    groups = [group for group in optimizer.param_groups if _fits(optimizer, group)]
    for group in groups:
        group["fused"] = True
    return bool(groups)


def keep_layouts(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Registers hooks that give gradients and moments the strides of their parameter before each fused step.

    Returns the handles of the hooks. Raises UsageError if a parameter of a fused group has gaps in memory, as a slice
    of another tensor has: no fused kernel for CPUs can update it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []  # an object with the methods of one has no kernels of PyTorch's
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"] if group.get("fused") else ()):
            if not is_sharded_tensor(parameter) and not _is_dense(parameter):
                raise UsageError(
                    f"parameter {place} of shape {tuple(parameter.shape)} has gaps in memory (strides "
                    f"{parameter.stride()}), and PyTorch's fused {type(optimizer).__name__} would update other "
                    "elements: make the parameter contiguous, or the optimizer without fused=True"
                )
    state_is_new = True

    def before_step(*_: object) -> None:
        nonlocal state_is_new
        for group in optimizer.param_groups:
            for parameter in group["params"] if group.get("fused") else ():
                gradient = parameter.grad
                if gradient is not None and _differs(gradient, parameter):
                    parameter.grad = _laid_out(gradient, parameter)
                state = optimizer.state.get(parameter, {}) if state_is_new else {}
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and _differs(value, parameter):
                        state[name] = _laid_out(value, parameter)
        state_is_new = False

    def after_loading(_: object) -> None:
        nonlocal state_is_new
        state_is_new = True

    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_load_state_dict_post_hook(after_loading),
    ]


def _fits(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    if group.get("fused") is not None or group.get("foreach") or group.get("differentiable"):
        return False
    if any(isinstance(group[name], torch.Tensor) for name in ("lr", "weight_decay")):
        return False
    # One operation updates all of them: whole tensors, or DTensors of one mesh.
    meshes = {p.device_mesh if is_sharded_tensor(p) else None for p in group["params"]}
    return len(meshes) <= 1 and all(_parameter_fits(optimizer, parameter) for parameter in group["params"])


def _parameter_fits(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    if is_sharded_tensor(parameter):
        if type(optimizer) not in _OF_SHARDED_TENSORS:
            return False
    elif type(parameter) not in (torch.Tensor, torch.nn.Parameter) or not _is_dense(parameter):
        return False
    if parameter.is_cuda:
        # Without state: that of the loop has its count of steps on the CPU.
        fits_device = type(optimizer) in _ON_GPUS and not optimizer.state
    else:
        fits_device = parameter.device.type == "cpu"
    return fits_device and parameter.is_floating_point()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor's elements fill a piece of memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _differs(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Returns True if the tensor has the parameter's shape, but other strides."""
    return (
        tensor.layout is torch.strided
        and tensor.stride() != parameter.stride()
        and tensor.shape == parameter.shape
        and not is_sharded_tensor(tensor)
    )


def _laid_out(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
