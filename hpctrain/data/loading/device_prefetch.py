"""Batches on a GPU before they are asked for: copied on a stream of their own while the last one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from hpctrain.data.loading.batch import Batch

T = TypeVar("T")


def batches_on(
    device: torch.device | str, batches: Iterable[Batch], *, dtype: torch.dtype | None = None
) -> Iterator[Batch]:
    """The batches on `device`, in order. dtype: of their floating-point fields, see `Batch.to`.

    On a CUDA device the copy of batch k + 1 is under way, on a stream of its own, while the caller works on
    batch k: one batch more is in the device's memory. The copies overlap with computation if the batches are
    in pinned memory (`Loader(..., pin_memory=True)`). Elsewhere nothing is held back.
    `Loader.position` counts batches taken from the loader: here it is one batch ahead. For a checkpoint use
    `batch.stop` of the last batch that was worked on.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return (batch.to(device, dtype=dtype) for batch in batches)
    copying = torch.cuda.Stream(device)

    def begin(batch: Batch) -> Batch:
        # Pinned memory goes back to torch's pool only when the copies out of it have ended: nothing to hold.
        with torch.cuda.stream(copying):
            return batch.to(device, dtype=dtype, non_blocking=True)

    def finish(batch: Batch) -> None:
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(copying)
        for tensor in batch.fields.values():
            # Allocated on the copying stream: it may be used again only once the work here is done.
            tensor.record_stream(computing)

    return one_ahead(iter(batches), begin=begin, finish=finish)


def one_ahead(source: Iterator[T], *, begin: Callable[[T], T], finish: Callable[[T], None]) -> Iterator[T]:
    """What `begin` makes of each item; that of item k + 1 is begun before item k is handed out.

    `finish` is called on what `begin` made, before the next is begun. An error of `source` or `begin` is
    raised where its item would have come.
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
    """None at the end of `source`."""
    try:
        for item in source:
            return (begin(item),)
    except Exception as error:  # handed on where its item would have come
        return error
    return None
