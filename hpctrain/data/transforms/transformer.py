"""Chooses where a loader's transform runs: in the loader's threads, or in worker processes."""

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
    """Interface of `BatchTransform`, which runs in the calling thread, and `WorkerPool`.

    name: of the function. input_copies: number of copies of a batch's input in memory while it is transformed.
    """

    name: str
    input_copies: int

    def place(self, thread: int) -> str:
        """Returns where the batch of a thread (its identifier) is transformed now; "" in that thread itself."""

    def __call__(self, arrays: Arrays, *, context: TransformContext) -> Arrays: ...


def build_transformer(transform: str | TransformFunction | None, *, workers: int) -> BatchTransformer | None:
    """Returns the transformer; None if `transform` is None.

    workers: number of worker processes; 0: the calling threads run the transform. Raises RecipeError if the transform
    cannot be imported, also by another process, or `workers` is not possible.
    """
    if workers < 0:
        raise RecipeError(f"workers = {workers}: must be 0 (threads) or more")
    if transform is None:
        if workers:
            raise RecipeError(
                f"workers = {workers} without a transform: workers only run a transform, threads read. Set a "
                "transform, or use workers = 0"
            )
        return None
    if workers:
        if not hasattr(os, "memfd_create"):
            raise RecipeError(
                f"workers = {workers}: workers need shared memory of Linux (memfd_create); use workers = 0"
            )
        named = find_transform(transform if isinstance(transform, str) else name_of(transform))
        return WorkerPool(named.name, num_workers=workers)
    if isinstance(transform, str):
        return find_transform(transform)
    return BatchTransform(transform, name=getattr(transform, "__qualname__", repr(transform)))


def transformed(
    fields: dict[str, torch.Tensor], *, by: BatchTransformer, context: TransformContext, pin_memory: bool
) -> dict[str, torch.Tensor]:
    """Returns the fields of a batch after the transform, with dtypes of `torch_dtype`."""
    made = by({name: tensor.numpy() for name, tensor in fields.items()}, context=context)
    return {name: as_tensor(array, pin_memory=pin_memory) for name, array in made.items()}
