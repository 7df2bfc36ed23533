"""Which layers of a model are which stage of a pipeline. Nothing here communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """A model's layers by stage. first_stage: of each parameter and buffer in a layer, by its name in the model."""

    layers: tuple[tuple[nn.Module, ...], ...]
    first_stage: Mapping[str, int]

    @property
    def num_stages(self) -> int:
        return len(self.layers)


def divide(model: nn.Module, layers: Sequence[nn.Module], *, num_stages: int) -> Stages:
    """Returns the stages of `model`, of which `layers`, called one after another, are all.

    The blocks, which are the layers of the class that occurs most often, are divided evenly. Layers before the first
    block belong to the first stage, others to the stage of the block before them. Raises UsageError if the blocks do
    not divide, for a parameter that is in no layer or in two stages, and for batch normalisation.
    """
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise UsageError("pipeline_layers returned no list of modules: return the model's layers, in order")
    kind, number = Counter(map(type, layers)).most_common(1)[0]
    if number % num_stages:
        raise UsageError(
            f"{number} blocks ({kind.__name__}) cannot be split into {num_stages} stages of equally many: use a "
            f"multiple of {num_stages} blocks, or fewer stages. Two stages are on each rank with schedule = "
            "'interleaved' and 'zero-bubble', one with 'gpipe' and '1f1b'"
        )
    blocks = [place for place, layer in enumerate(layers) if type(layer) is kind]
    starts = [0, *blocks[number // num_stages :: number // num_stages], len(layers)]
    stages = tuple(tuple(layers[start:stop]) for start, stop in pairwise(starts))
    _check_layers(layers)
    return Stages(layers=stages, first_stage=_first_stages(model, stages))


def check_held_by_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Raises UsageError for a parameter that a module of `model` outside of `layers` holds: where a parameter is
    replaced, as sharding does, it would keep the old one."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if id(module) not in inside:
                full = f"{module_name}.{name}" if module_name else name
                raise UsageError(
                    f"the parameter {full} is held by {type(module).__name__}, which is in no layer of "
                    "pipeline_layers: put it into a module that is one of the layers, or leave shard = 'parameters' out"
                )


def release_others(model: nn.Module, stages: Stages, *, own: Sequence[int]) -> None:
    """Leaves out of `model` the parameters and buffers that lie in other stages only. The others keep their names."""
    kept = {id(tensor) for stage in own for layer in stages.layers[stage] for tensor in _tensors(layer)}
    everything = {id(tensor) for stage in stages.layers for layer in stage for tensor in _tensors(layer)}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if id(tensor) in everything - kept:
                    slots[name] = None


def _check_layers(layers: Sequence[nn.Module]) -> None:
    for place, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, _BatchNorm):
                raise UsageError(
                    f"layer {place} of pipeline_layers has batch normalisation ({name or type(module).__name__}): its "
                    "statistics would be those of micro-batches. Use another normalisation, such as nn.GroupNorm or "
                    "nn.LayerNorm, or leave pipeline out"
                )


def _first_stages(model: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> dict[str, int]:
    of_tensor: dict[int, list[int]] = {}
    for number, stage in enumerate(stages):
        for identity in {id(tensor) for layer in stage for tensor in _tensors(layer)}:
            of_tensor.setdefault(identity, []).append(number)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found = of_tensor.get(id(parameter), [])
        if not found:
            raise UsageError(
                f"the parameter {name} is in no layer of pipeline_layers: return all layers of the model, in order"
            )
        if len(found) > 1:
            raise UsageError(
                f"the parameter {name} is used in stages {found[0]} and {found[1]} of the pipeline: untie it, so that "
                "each stage has parameters of its own, or leave pipeline out"
            )
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: of_tensor[id(tensor)][0] for name, tensor in named if id(tensor) in of_tensor}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
