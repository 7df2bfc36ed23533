"""The parts of layers that one rank of a tensor group holds, so that what it needs can be measured on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

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
# Of a module's input and of its output, how often the ranks of a group sum it in forward and in backward; what is
# gathered or scattered counts half.
_Shares: TypeAlias = tuple[tuple[float, float], tuple[float, float]]
_SUMMED: dict[str, _Shares] = {
    "row": ((0, 0), (1, 0)),
    "column": ((0, 1), (0, 0)),
    "column-gathered": ((0, 1), (0.5, 0)),
}
_SUMMED_ON_PARTS: dict[str, _Shares] = {
    "row": ((0, 0), (0.5, 0.5)),
    "column": ((0.5, 0.5), (0, 0)),
    "column-gathered": ((0.5, 0.5), (0.5, 0)),
    "sequence": ((0, 0), (0, 0)),
    "sequence-gathered": ((0, 0), (0.5, 0)),
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


def leave_one_part(model: nn.Module, plan: TensorPlan, *, tensor: int, sequence: bool = False) -> None:
    """Leaves in `model`, in place, what the first of `tensor` ranks has, which computes without the others.

    sequence: of what lies between split layers it has its part of the sequence. Shapes are those of that rank; the
    numbers are wrong: a part is taken for the sum over the ranks, and repeated for what is gathered.
    """
    dims = split_dimensions(model, plan)
    for name, how in tensor_styles(model, plan).items():
        module: Any = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            dim = dims.get(f"{name}.{key}")
            if dim is not None:
                part = parameter.detach().chunk(tensor, dim)[0].clone()
                setattr(module, key, nn.Parameter(part, requires_grad=parameter.requires_grad))
        embeds = isinstance(module, nn.Embedding)
        if sequence and how != "row" and not embeds:
            _change_input(module, partial(_repeated, times=tensor, dim=-2))
        if how == "column-gathered":
            _change_output(module, partial(_repeated, times=tensor, dim=-1))
        elif embeds:
            _change_input(module, partial(torch.remainder, other=module.weight.shape[0]))
        if sequence and (how == "row" or embeds):
            _change_output(module, partial(_first_part, parts=tensor, dim=-2))
    for name, how in _on_parts(model, plan).items() if sequence else ():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            _change_input(module, partial(_first_part, parts=tensor, dim=-1))
        if how == "sequence-gathered":
            _change_output(module, partial(_repeated, times=tensor, dim=-2))


def _on_parts(model: nn.Module, plan: TensorPlan) -> dict[str, str]:
    """Returns how each module is computed that has a part of the sequence, by name."""
    found = {}
    for how in ("sequence", "sequence-gathered"):
        # By their patterns alone: those of layers that are split are found in the same way.
        named = {
            pattern: "column"
            for pattern, given in plan.items()
            if (given if isinstance(given, str) else given[0]) == how
        }
        found.update(dict.fromkeys(tensor_styles(model, named), how))
    return found


_Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def _change_input(module: nn.Module, change: _Change) -> None:
    module.register_forward_pre_hook(lambda _, args: (change(args[0]),))


def _change_output(module: nn.Module, change: _Change) -> None:
    module.register_forward_hook(lambda _, args, output: change(output))


def _repeated(part: torch.Tensor, *, times: int, dim: int) -> torch.Tensor:
    """Returns a tensor of the shape that the ranks' parts have once they are gathered."""
    return torch.cat([part] * times, dim=dim)


def _first_part(whole: torch.Tensor, *, parts: int, dim: int) -> torch.Tensor:
    return whole.chunk(parts, dim)[0].clone()


def _weight_dim(module: nn.Module, how: str) -> int:
    return next(
        dim for (kind, style), dim in _WEIGHT_DIMS.items() if style == how and isinstance(module, kind)
    )


@contextmanager
def counted_messages(
    model: nn.Module, plan: TensorPlan, *, samples: int, sequence: bool = False
) -> Iterator[Callable[[], TensorMessages]]:
    """Counts, in a forward of `samples` within the `with` block, what the ranks of a tensor group would sum.

    The value is a function that returns the sums afterwards. A `row` module's output is summed in forward, the gradient
    of a `column` module's input in backward. With `sequence` both are scattered or gathered in both directions, which
    is half a sum each.
    """
    blocks = repeated_blocks(model)
    sums = {"forward": 0.0, "in_blocks": 0.0, "backward": 0.0}

    def counting(name: str, how: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        in_block = any(name.startswith(f"{block}.") for block in blocks)

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            takes = args[0].nbytes if args[0].is_floating_point() else 0
            of_input, of_output = _SUMMED_ON_PARTS[how] if sequence else _SUMMED[how]
            forward, backward = (
                (a * takes + b * output.nbytes) / samples for a, b in zip(of_input, of_output, strict=True)
            )
            sums["forward"] += forward
            sums["in_blocks"] += forward if in_block else 0.0
            sums["backward"] += backward

        return hook

    styles = {**tensor_styles(model, plan), **(_on_parts(model, plan) if sequence else {})}
    hooks = [
        model.get_submodule(name).register_forward_hook(counting(name, how)) for name, how in styles.items()
    ]
    try:
        yield lambda: TensorMessages(**sums)
    finally:
        for hook in hooks:
            hook.remove()
