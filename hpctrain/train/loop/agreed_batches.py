"""Batches of checked data: the ranks agree on the number of damaged samples before they compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from hpctrain.comm import Collective, raise_together
from hpctrain.data import Batch
from hpctrain.errors import DataError, HpctrainError


def agreed_batches(
    batches: Iterable[Batch],
    *,
    comm: Collective,
    waited: Callable[[float], None] = lambda seconds: None,
    counts_samples: bool = True,
) -> Iterator[Batch]:
    """Yields `batches` with `global_skipped` set, so that `weight` is right on all ranks. Collective for each batch.

    Costs an all-reduce of two numbers per batch; `waited` is called with the seconds that it took. counts_samples:
    False on ranks that read the samples of another one, which counts them.
    Raises the same error on every rank if reading a batch failed on any; DataError if all samples of a global batch
    are damaged.
    """
    iterator = iter(batches)
    while True:
        batch: Batch | None = None
        error: HpctrainError | None = None
        try:
            batch = next(iterator, None)
        except HpctrainError as caught:
            error = caught
        if batch is None and error is None:
            return  # every rank has the same number of batches
        skipped = batch.num_skipped if batch is not None and counts_samples else 0
        found = torch.tensor([skipped, error is not None], dtype=torch.int64)
        started = time.perf_counter()
        comm.all_reduce(found)
        waited(time.perf_counter() - started)
        num_skipped, failed = map(int, found)
        if failed:
            raise_together(comm, error)
        assert batch is not None
        if num_skipped == batch.global_samples:
            raise DataError(
                f"all {num_skipped} samples of the global batch at position {batch.start} of epoch {batch.epoch} "
                "are damaged: restore the dataset (hpctrain data verify lists what is damaged)",
                agreed=True,
            )
        yield replace(batch, global_skipped=num_skipped)
