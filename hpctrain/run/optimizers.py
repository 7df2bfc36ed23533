"""The recipe's optimizer section as an object of torch.optim."""

from __future__ import annotations

import torch

from hpctrain.errors import RecipeError
from hpctrain.run.recipe.schema import OptimizerSection


def build_optimizer(model: torch.nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """lr is set anew before each step by the schedule; what is given here is its peak."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise RecipeError(
            "the task's model has no parameter that needs a gradient: there is nothing to train"
        )
    if section.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=section.lr, momentum=section.momentum, weight_decay=section.weight_decay
        )
    kind = torch.optim.Adam if section.name == "adam" else torch.optim.AdamW
    first, second = section.betas
    return kind(parameters, lr=section.lr, betas=(first, second), weight_decay=section.weight_decay)
