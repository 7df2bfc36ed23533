"""The recipe's section [optimizer] as an optimizer and a learning rate schedule."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from hpctrain.errors import RecipeError, UsageError
from hpctrain.reduce import Layout
from hpctrain.run.recipe.parallel_schema import ParallelSection
from hpctrain.run.recipe.schema import OptimizerSection
from hpctrain.run.reduction import check_for_layouts
from hpctrain.train import LR_SCALE, Decay, check_call, import_named


def build_optimizer(model: torch.nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """Returns the optimizer of the model's trainable parameters.

    Its learning rate is the peak; the loop sets it before each step. Raises RecipeError where it cannot be made.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise RecipeError(
            "the task's model has no parameter that needs a gradient: there is nothing to train"
        )
    if section.target is not None:
        return _from_target(model, parameters, section, section.target)
    common: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    first, second = section.betas
    match section.name:
        case "sgd":
            return torch.optim.SGD(parameters, momentum=section.momentum, **common)
        case "adam":
            return torch.optim.Adam(parameters, betas=(first, second), **common)
        case "adamw":
            return torch.optim.AdamW(parameters, betas=(first, second), **common)
        case "lars":
            return _large_batch("LARS")(parameters, momentum=section.momentum, **common)
        case "lamb":
            # As in the paper: the decay counts in the ratio of norms, and no bias is corrected.
            return _large_batch("Lamb")(
                parameters, betas=(first, second), weight_decouple=False, adam_debias=True, **common
            )


def check_recipe_optimizer(
    optimizer: torch.optim.Optimizer, parallel: ParallelSection, *, model: torch.nn.Module
) -> None:
    """Raises RecipeError for an optimizer that cannot be stepped as the section [parallel] lays the model out."""
    found = list[Layout]()
    if parallel.tensor > 1:
        found.append("tensor")
    if parallel.pipeline > 1:
        found.append("stages")
    if parallel.shard != "none":
        found.append(parallel.shard)
    try:
        check_for_layouts(optimizer, found, model=model)
    except UsageError as error:
        raise RecipeError(f"section [optimizer]: {error}") from error


def build_decay(section: OptimizerSection) -> Decay | Callable[[int, int], float]:
    """Returns how the learning rate falls after the warm-up. Raises RecipeError for a function that does not exist."""
    if section.schedule_target is None:
        return Decay(section.schedule)
    found = import_named(section.schedule_target, key="optimizer.schedule_target")
    if not callable(found):
        raise RecipeError(
            f"optimizer.schedule_target = {section.schedule_target} is {type(found).__name__}, not a function"
        )
    check_call(found, 0, 1, target=section.schedule_target, options_key="(step, number of steps)", options={})
    return found


def _large_batch(name: str) -> Callable[..., torch.optim.Optimizer]:
    try:
        found: Callable[..., torch.optim.Optimizer] = getattr(import_module("pytorch_optimizer"), name)
    except ImportError as error:
        raise RecipeError(
            f"optimizer.name = {name.lower()} needs the package pytorch-optimizer: {error}. Install it with "
            "`pip install hpctrain[optimizers]`"
        ) from error
    release = version("pytorch_optimizer")
    if [int(part) for part in re.findall(r"\d+", release)[:2]] < [3, 11]:
        # LARS without weight decay in the layer's ratio, LAMB with weight decay in the gradient.
        raise RecipeError(
            f"optimizer.name = {name.lower()} needs pytorch-optimizer 3.11 or newer, this is {release}, which "
            "calculates other steps. Update it with `pip install hpctrain[optimizers]`"
        )
    return found


def _from_target(
    model: torch.nn.Module,
    parameters: list[torch.nn.Parameter],
    section: OptimizerSection,
    target: str,
) -> torch.optim.Optimizer:
    found = import_named(target, key="optimizer.target")
    if not callable(found):
        raise RecipeError(f"optimizer.target = {target} is {type(found).__name__}, not a class or a function")
    of_class = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    given: Any = parameters if of_class else model
    options = {"lr": section.lr, **section.options}
    check_call(found, given, target=target, options_key="optimizer.lr and optimizer.options", options=options)
    try:
        made = found(given, **options)
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(f"optimizer.target = {target} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise RecipeError(
            f"optimizer.target = {target} returned {type(made).__name__}, not a torch.optim.Optimizer"
        )
    for group in made.param_groups:
        if group["lr"] != section.lr:
            group[LR_SCALE] = float(group["lr"]) / section.lr
    return made
