"""Batches on a GPU before they are asked for: copied on a stream of their own while the last one is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hpctrain.data.batch import Batch


def batches_on(device: torch.device | str, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches on `device`, in order.

    On a CUDA device the copy of batch k + 1 is under way, on a stream of its own, while the caller works on
    batch k: one batch more is in the device's memory. The copies overlap with computation if the batches are
    in pinned memory (`Loader(..., pin_memory=True)`). Elsewhere nothing is held back.
    `Loader.position` counts batches taken from the loader: here it is one batch ahead. For a checkpoint use
    `batch.stop` of the last batch that was worked on.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return (batch.to(device) for batch in batches)
    return _copied_ahead(iter(batches), device=device, stream=torch.cuda.Stream(device))


def _copied_ahead(source: Iterator[Batch], *, device: torch.device, stream: Any) -> Iterator[Batch]:
    ahead = _begin(source, device=device, stream=stream)
    while ahead is not None:
        batch, pinned = ahead
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        for tensor in batch.fields.values():
            # Its memory belongs to the copying stream: it may be used again only once the work here is done.
            tensor.record_stream(computing)
        # The copy that was waited for has ended before the pinned memory goes back to its pool: that pool
        # knows the stream of each copy. Held until the next copy is begun all the same.
        ahead = _begin(source, device=device, stream=stream)
        del pinned
        yield batch


def _begin(source: Iterator[Batch], *, device: torch.device, stream: Any) -> tuple[Batch, Batch] | None:
    """Start copying the next batch; returns it and the one it is copied from."""
    pinned = next(source, None)
    if pinned is None:
        return None
    with torch.cuda.stream(stream):
        return pinned.to(device, non_blocking=True), pinned
