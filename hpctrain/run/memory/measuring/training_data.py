"""Reads the first samples of a recipe's training data, and how much of it a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.data import Batch, Dataset, Loader, Sequential
from hpctrain.run.memory.sizes import LoaderSizes
from hpctrain.run.recipe.schema import Recipe

# Samples of the largest micro-batch that is measured, unless the recipe's is smaller; at least the first number, since
# batch normalisation needs some.
_LEAST_SAMPLES, _MOST_SAMPLES = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The first samples, and sizes for the loader."""

    first: Batch
    loader: LoaderSizes


def read_training_data(
    recipe: Recipe, *, micro_batch: int, note: Callable[[str], None]
) -> TrainingData | None:
    """Returns the first samples of the training data, about `micro_batch` of them. None, with a note, if that fails."""
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
        note(
            f"activations were not measured and count as nothing, since no training data can be read: {error}"
        )
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
