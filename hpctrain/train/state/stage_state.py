"""What of a training state belongs to this rank's stages of a pipeline. Without a pipeline, all of it does."""

from __future__ import annotations

import torch

from hpctrain.checkpoint import SEPARATOR, Checkpoint, Item, Regions, Shard
from hpctrain.distributed import pipeline_of

_OF_PARAMETERS = ("model", "optimizer", "ema")  # kinds of tensors that belong to one parameter or buffer


def saved_by_stage(model: torch.nn.Module, item: Item) -> Item | None:
    """Returns what this rank saves of the model or the optimizer in a pipeline: what only its stage has, as the one box
    of a tensor, or None. Boxes of split tensors, everything else, and all without a pipeline, as it is."""
    pipeline, (kind, _, path) = pipeline_of(model), item.name.partition("/")
    if pipeline is None or kind not in _OF_PARAMETERS or isinstance(item, Shard):
        return item
    if not pipeline.saves(path.split(SEPARATOR)[0]):
        return None
    shape = tuple(item.tensor.shape)
    return Shard(name=item.name, tensor=item.tensor, global_shape=shape, offset=(0,) * len(shape))


def is_elsewhere(model: torch.nn.Module, name: str) -> bool:
    """Returns True if a checkpoint's tensor belongs to stages of a pipeline that this rank has not."""
    pipeline, (kind, _, path) = pipeline_of(model), name.partition("/")
    if pipeline is None or kind not in _OF_PARAMETERS:
        return False
    return pipeline.is_elsewhere(path.split(SEPARATOR)[0])


def nothing_of_other_stages(model: torch.nn.Module, checkpoint: Checkpoint) -> Regions:
    """Returns an empty box of each of the checkpoint's tensors of which this rank needs nothing."""
    return {
        name: ((0,) * len(stored.shape), (0,) * len(stored.shape))
        for name, stored in checkpoint.tensors.items()
        if stored.shape and is_elsewhere(model, name)
    }
