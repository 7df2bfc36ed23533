"""Where a loader's transform runs: in the loader's own threads, or in workers."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from hpctrain.data.transforms.torch_dtypes import as_tensor
from hpctrain.data.transforms.transform import (
    Arrays,
    BatchTransform,
    TransformContext,
    TransformFunction,
    find_transform,
    name_of,
)
from hpctrain.data.transforms.worker_pool import WorkerPool
from hpctrain.errors import RecipeError


class BatchTransformer(Protocol):
    """`BatchTransform`, in the thread that calls it, or `WorkerPool`.

    input_copies: how often a batch's input is in memory while it is transformed.
    """

    input_copies: int

    def __call__(self, arrays: Arrays, *, context: TransformContext) -> Arrays: ...


def build_transformer(transform: str | TransformFunction | None, *, workers: int) -> BatchTransformer | None:
    """None without a transform. `workers` 0: the calling threads transform; else so many processes.

    Raises RecipeError if the transform is not found, or cannot be found by another process.
    """
    if workers < 0:
        raise RecipeError(f"workers = {workers}: 0 (threads) or more are possible")
    if transform is None:
        if workers:
            raise RecipeError(
                f"workers = {workers} without a transform: workers only transform, threads read. Name a "
                "transform, or use workers = 0"
            )
        return None
    if workers:
        if not hasattr(os, "memfd_create"):
            raise RecipeError(
                f"workers = {workers}: only Linux has the shared memory for them; use workers = 0"
            )
        named = find_transform(transform if isinstance(transform, str) else name_of(transform))
        return WorkerPool(named.name, num_workers=workers)
    if isinstance(transform, str):
        return find_transform(transform)
    return BatchTransform(transform, name=getattr(transform, "__qualname__", repr(transform)))


def transformed(
    fields: dict[str, torch.Tensor], *, by: BatchTransformer, context: TransformContext, pin_memory: bool
) -> dict[str, torch.Tensor]:
    """The fields of a batch after the transform, with dtypes that torch computes with."""
    made = by({name: tensor.numpy() for name, tensor in fields.items()}, context=context)
    return {name: as_tensor(array, pin_memory=pin_memory) for name, array in made.items()}
