"""Copies each batch to the GPU in advance, on a separate stream, while the previous one is being processed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from hpctrain.data.loading.batch import Batch

T = TypeVar("T")


def batches_on(
    device: torch.device | str, batches: Iterable[Batch], *, dtype: torch.dtype | None = None
) -> Iterator[Batch]:
    """Yields the batches on `device`, in order. dtype: of their floating-point fields, see `Batch.to`.

    On a CUDA device batch k + 1 is copied on a separate stream while the caller works on batch k, so one more
    batch takes device memory. The copies overlap with computation if the batches are in pinned memory
    (`Loader(..., pin_memory=True)`). On other devices no batch is taken in advance.
    `Loader.position` counts batches taken from the loader: on a CUDA device it is one batch ahead. For a checkpoint
    use `batch.stop` of the last batch that was processed.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return (batch.to(device, dtype=dtype) for batch in batches)
    copying = torch.cuda.Stream(device)

    def begin(batch: Batch) -> Batch:
        # torch reuses the pinned memory only after the copies have ended: no reference to it is needed here.
        with torch.cuda.stream(copying):
            return batch.to(device, dtype=dtype, non_blocking=True)

    def finish(batch: Batch) -> None:
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(copying)
        for tensor in batch.fields.values():
            # Allocated on the copying stream: its memory must not be reused before the computing stream is done.
            tensor.record_stream(computing)

    return one_ahead(iter(batches), begin=begin, finish=finish)


def one_ahead(source: Iterator[T], *, begin: Callable[[T], T], finish: Callable[[T], None]) -> Iterator[T]:
    """Yields `begin(item)` for each item of `source`, calling it for item k + 1 before item k is yielded.

    `finish` is called with each result of `begin`, before the next item is begun. An error of `source` or `begin`
    is raised in place of its item.
    """
    ahead = _begun(source, begin)
    while True:
        if isinstance(ahead, Exception):
            raise ahead
        if ahead is None:
            return
        (item,) = ahead
        finish(item)
        ahead = _begun(source, begin)
        yield item


def _begun(source: Iterator[T], begin: Callable[[T], T]) -> tuple[T] | Exception | None:
    """Returns the result of `begin` for the next item, or the error that was raised; None at the end of `source`."""
    try:
        for item in source:
            return (begin(item),)
    except Exception as error:  # the caller raises it in place of the item
        return error
    return None
