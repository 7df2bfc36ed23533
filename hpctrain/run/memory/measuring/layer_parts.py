"""The parts of layers that one rank of a tensor group holds, so that what it needs can be measured on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpctrain.distributed import TensorPlan, repeated_blocks, tensor_styles
from hpctrain.run.memory.sizes import TensorMessages

# Dimension of `weight` along which it is split.
_WEIGHT_DIMS = {
    (nn.Linear, "column"): 0,
    (nn.Linear, "column-gathered"): 0,
    (nn.Linear, "row"): 1,
    (nn.Embedding, "column-gathered"): 1,
    (nn.Embedding, "row"): 0,
}


def split_dimensions(model: nn.Module, plan: TensorPlan) -> dict[str, int]:
    """Returns the dimension along which each parameter is split, by name; without those that are not.

    `plan` has passed `check_plan`.
    """
    found = {}
    for name, how in tensor_styles(model, plan).items():
        module = model.get_submodule(name)
        found[f"{name}.weight"] = _weight_dim(module, how)
        if isinstance(module, nn.Linear) and module.bias is not None and how != "row":
            found[f"{name}.bias"] = 0
    return found


def leave_one_part(model: nn.Module, plan: TensorPlan, *, tensor: int) -> None:
    """Leaves in `model`, in place, what the first of `tensor` ranks has, which computes without the others.

    Shapes are those of that rank; the numbers are wrong: a part is taken for the sum over the ranks.
    """
    dims = split_dimensions(model, plan)
    for name, how in tensor_styles(model, plan).items():
        module: Any = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            dim = dims.get(f"{name}.{key}")
            if dim is not None:
                part = parameter.detach().chunk(tensor, dim)[0].clone()
                setattr(module, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
        if how == "column-gathered":
            module.register_forward_hook(_repeated(tensor))
        elif isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(_within(module.weight.shape[0]))


def _repeated(tensor: int) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    """Returns a hook that gives the output the shape that it has once it is gathered."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output] * tensor, dim=-1)

    return hook


def _within(rows: int) -> Callable[[nn.Module, Any], tuple[torch.Tensor]]:
    def hook(module: nn.Module, args: Any) -> tuple[torch.Tensor]:
        return (args[0] % rows,)

    return hook


def _weight_dim(module: nn.Module, how: str) -> int:
    return next(
        dim for (kind, style), dim in _WEIGHT_DIMS.items() if style == how and isinstance(module, kind)
    )


@contextmanager
def counted_messages(
    model: nn.Module, plan: TensorPlan, *, samples: int
) -> Iterator[Callable[[], TensorMessages]]:
    """Counts, in a forward of `samples` within the `with` block, what the ranks of a tensor group would sum.

    The value is a function that returns the sums afterwards. A `row` module's output is summed in forward, the gradient
    of a `column` module's input in backward.
    """
    blocks = repeated_blocks(model)
    sums = {"forward": 0.0, "in_blocks": 0.0, "backward": 0.0}

    def counting(name: str, how: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        in_block = any(name.startswith(f"{block}.") for block in blocks)

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            summed = {"row": 1.0, "column-gathered": 0.5, "column": 0.0}[how] * output.nbytes / samples
            sums["forward"] += summed
            sums["in_blocks"] += summed if in_block else 0.0
            if how != "row" and args[0].is_floating_point():
                sums["backward"] += args[0].nbytes / samples

        return hook

    hooks = [
        model.get_submodule(name).register_forward_hook(counting(name, how))
        for name, how in tensor_styles(model, plan).items()
    ]
    try:
        yield lambda: TensorMessages(**sums)
    finally:
        for hook in hooks:
            hook.remove()
