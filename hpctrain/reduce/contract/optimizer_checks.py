"""Which optimizers an updater can step: the others are refused by name when the updater is made. Pure."""

from __future__ import annotations

import inspect
from typing import Literal, TypeAlias

import torch

from hpctrain.errors import UsageError

# How a model is laid out over the ranks: "none" is a whole copy on each. "stages": a pipeline.
Layout: TypeAlias = Literal["none", "optimizer", "gradients", "parameters", "tensor", "stages"]

_NAMES: dict[Layout, str] = {
    "optimizer": "a sharded optimizer (shard = 'optimizer')",
    "gradients": "sharded gradients (shard = 'gradients')",
    "parameters": "sharded parameters (shard = 'parameters')",
    "tensor": "split layers (tensor > 1)",
    "stages": "a pipeline (pipeline > 1)",
}
# Optimizers whose update of an element depends on the others of its layer.
_WHOLE_LAYERS = ("lars", "lamb", "lbfgs", "muon", "adafactor", "shampoo", "soap")

# Those of PyTorch 2.13 whose `step` fails for DTensors: means over rows and columns, assignments by a mask.
_NOT_ON_PARTS = ("adafactor", "rprop")


def check_optimizer(
    optimizer: torch.optim.Optimizer, *, layout: Layout, model: torch.nn.Module | None = None
) -> None:
    """Raises UsageError, with what to use instead, for an optimizer that cannot be stepped in `layout`.

    model: whose layers must not have sparse gradients where ranks have parts of layers, or stages.
    """
    name = type(optimizer).__name__
    if takes_closure(optimizer):
        raise UsageError(
            f"{name} calls a closure that computes the loss again within a step, and an updater steps on gradients "
            "that are summed already: use AdamW, or SGD with momentum"
        )
    if layout == "none":
        return
    where = _NAMES[layout]
    if takes_sparse_gradients(optimizer):
        raise UsageError(
            f"{name} takes sparse gradients, which {where} does not have: give each rank the whole model, or use "
            "Embedding(sparse=False) and Adam"
        )
    if layout in ("optimizer", "gradients") and is_by_layer(optimizer):
        raise UsageError(
            f"{name} needs whole layers to update an element, such as their norms, of which a rank has a part with "
            f"{where}: use AdamW, Adam or SGD, or leave shard out"
        )
    if layout in ("parameters", "tensor") and _is_one_of(optimizer, _NOT_ON_PARTS):
        raise UsageError(
            f"{name} uses operations that PyTorch does not have for parts of parameters, of which {where} consists: "
            "use AdamW, Adam or SGD, or leave parameters whole"
        )
    sparse = [name for name, module in model.named_modules() if _has_sparse_gradient(module)] if model else []
    if layout in ("parameters", "tensor", "stages") and sparse:
        raise UsageError(
            f"module {sparse[0]!r} has sparse gradients (sparse=True), which are not summed with {where}: make it with "
            "sparse=False, or give each rank the whole model"
        )


def takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if `step` cannot be called without a closure, as LBFGS's."""
    given = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in given
    )


def takes_sparse_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the optimizer refuses dense gradients."""
    return _is_one_of(optimizer, ("sparseadam",))


def is_by_layer(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the update of an element depends on others of its layer, as far as is known."""
    return _is_one_of(optimizer, _WHOLE_LAYERS)


def _is_one_of(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> bool:
    return any(base.__name__.lower() in names for base in type(optimizer).__mro__)


def _has_sparse_gradient(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
