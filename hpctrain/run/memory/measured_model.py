"""Counts a model's parameters and optimizer state, and reads the first samples of its training data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hpctrain.data import Batch, Dataset, Loader, Sequential
from hpctrain.distributed import TensorPlan, repeated_blocks
from hpctrain.errors import HpctrainError
from hpctrain.run.build import build_model, build_optimizer
from hpctrain.run.memory.forward_backward import split_dimensions
from hpctrain.run.memory.sizes import LoaderSizes, ModelSizes, ParameterSize
from hpctrain.run.recipe.schema import OptimizerSection, Recipe
from hpctrain.train import Task

# Counts a model's parameters, buffers and optimizer state, on the meta device, where tensors have no
# memory.


META = torch.device("meta")
# The size of each dimension of the parameters with which an optimizer is tried if it cannot step on the meta device.
_SMALL = 4


class StateSize(NamedTuple):
    """The optimizer state of one parameter: the bytes of tensors with the parameter's shape, and of other tensors."""

    like_parameter: int
    other: int


def model_on_meta(
    recipe: Recipe, make_task: Callable[[], Task], *, note: Callable[[str], None]
) -> torch.nn.Module:
    """Returns the task's model on the meta device. Raises RecipeError if the task cannot build the model.

    note: called with a text if the model must be built on the CPU first. This takes memory for the whole model.
    """
    try:
        with META:
            return build_model(recipe, make_task(), device=META)
    except HpctrainError as error:
        model = build_model(recipe, make_task(), device=META)
        note(
            f"the model was built on the CPU to be counted, since it cannot be built on the meta device: {error}"
        )
        return model


def count_model(
    model: torch.nn.Module,
    section: OptimizerSection,
    *,
    tensor_plan: TensorPlan | None = None,
    note: Callable[[str], None],
) -> ModelSizes:
    """Returns the sizes of `model`, which is on the meta device.

    section: the recipe's section [optimizer].
    tensor_plan: the task's plan for splitting layers.
    note: function that is called with a text about anything that could not be measured.
    """
    blocks = repeated_blocks(model)
    split = split_dimensions(model, tensor_plan) if tensor_plan else {}
    states = optimizer_state(model, section, note=note)
    parameters = []
    for name, parameter in model.named_parameters():
        state = states.get(parameter, StateSize(0, 0))
        parameters.append(
            ParameterSize(
                shape=tuple(parameter.shape),
                itemsize=parameter.element_size(),
                trainable=parameter.requires_grad,
                block=next((block for block in blocks if name.startswith(f"{block}.")), ""),
                state_bytes=state.like_parameter,
                other_state_bytes=state.other,
                name=name,
                tensor_dim=split.get(name),
            )
        )
    return ModelSizes(parameters=tuple(parameters), buffer_bytes=sum(b.nbytes for b in model.buffers()))


def optimizer_state(
    model: torch.nn.Module, section: OptimizerSection, *, note: Callable[[str], None]
) -> dict[torch.Tensor, StateSize]:
    """Returns the size of the optimizer state of each trainable parameter, after a step on the meta device.

    If the step needs values of tensors, which the meta device lacks, the optimizer is tried on the CPU with small
    parameters of the same numbers of dimensions. Raises RecipeError if the optimizer cannot be created.
    """
    optimizer = build_optimizer(model, section)
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        return _after_a_step(optimizer, trained)
    except Exception:  # of an optimizer of the user's: anything
        pass
    small = torch.nn.ParameterList(
        torch.nn.Parameter(torch.zeros([_SMALL] * dims, dtype=dtype))
        for dims, dtype in sorted({(p.dim(), p.dtype) for p in trained}, key=str)
    )
    try:
        found = _after_a_step(build_optimizer(small, section), list(small))
    except Exception as error:
        note(
            f"the optimizer's state could not be measured ({type(error).__name__}: {error}): two values for each "
            "parameter are assumed"
        )
        return {p: StateSize(2 * p.nbytes, 0) for p in trained}
    of_kind = {(p.dim(), p.dtype): (state, p.nbytes) for p, state in found.items()}
    states: dict[torch.Tensor, StateSize] = {}
    for p in trained:
        state, num_bytes = of_kind[p.dim(), p.dtype]
        states[p] = StateSize(state.like_parameter * p.nbytes // num_bytes, state.other)
    return states


def _after_a_step(
    optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter]
) -> dict[torch.Tensor, StateSize]:
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {p: _size_of(optimizer.state.get(p, {}), p) for p in trained}


def _size_of(state: dict[str, object], parameter: torch.Tensor) -> StateSize:
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    like = sum(tensor.nbytes for tensor in tensors if tensor.shape == parameter.shape and tensor.dim())
    return StateSize(like, sum(tensor.nbytes for tensor in tensors) - like)


# Reads the first samples of a recipe's training data, and how much of it a rank holds.


# Samples of the largest micro-batch that is measured, unless the recipe's is smaller; at least the first number, since
# batch normalisation needs some.
_LEAST_SAMPLES, _MOST_SAMPLES = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The first samples of the training data, and the sizes for the loader."""

    first: Batch
    loader: LoaderSizes


def read_training_data(
    recipe: Recipe, *, micro_batch: int, note: Callable[[str], None]
) -> TrainingData | None:
    """Returns the first `micro_batch` samples of the training data, but at least 4 and at most 16 if there are as many.

    Returns None, with a note, if samples cannot be read.
    """
    section = recipe.data
    try:
        io = "auto" if section.io == "collective" else section.io
        dataset = Dataset.open(section.train, verify="off", io=io)
        wanted = min(max(micro_batch, _LEAST_SAMPLES), _MOST_SAMPLES, dataset.num_samples)
        loader = Loader(
            dataset, global_batch=wanted, order=Sequential(), transform=section.transform, prefetch_bytes=1
        )
        with loader.epoch(0) as batches:
            first = next(batches)
    except Exception as error:  # the user's transform may raise anything
        note(f"activations were not measured and count as 0, since no training data can be read: {error}")
        return None
    decoded = any(
        stored.offset is None for shard in dataset.manifest.shards for stored in shard.fields.values()
    )
    cache = dataset.cache_bytes if section.cache_mb is None else int(section.cache_mb * 1e6)
    sizes = LoaderSizes(
        sample_bytes=math.ceil(first.num_bytes / first.num_samples),
        num_samples=dataset.num_samples,
        prefetch_bytes=int(section.prefetch_mb * 1e6),
        cache_bytes=cache if decoded else 0,
    )
    return TrainingData(first=first, loader=sizes)
