"""One rank's part of a global batch, its memory, and its copy to a device."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import PositionRange, rank_share
from hpctrain.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's samples of one global batch.

    Multiply the mean loss over this rank's `num_samples` samples by `weight`. The sum of these products over all ranks
    is the mean loss over the global batch, for any distribution of the samples over the ranks.

    Attributes:
        fields: Tensors by name, of shape (num_samples + num_padded, *sample_shape).
        epoch: Number of the epoch, from 0.
        start: Position in the epoch of the first sample of the global batch, in samples over all ranks.
        num_samples: Number of samples of this rank, without padding. It may be 0: the last batch of an epoch can have
            fewer samples than there are ranks.
        global_samples: Number of samples of all ranks in the global batch, without padding.
        num_padded: Number of padding rows at the end of the tensors (`LastBatch.PAD`). Padding rows repeat other
            samples and must not be counted: `real()` returns the batch without padding rows, `valid` masks them.
        num_skipped: Number of samples of this rank that were left out because they lie in damaged blocks
            (`OnDamage.SKIP`).
        global_skipped: Sum of `num_skipped` over all ranks. It is 0 until the ranks have exchanged their numbers, as
            `hpctrain.train.loop.evaluate` does.
        indices: For each row, the index of its sample in the dataset: int64, shape (num_samples + num_padded,). None
            if unknown.
    """

    fields: dict[str, torch.Tensor]
    epoch: int
    start: int
    num_samples: int
    global_samples: int
    num_padded: int = 0
    num_skipped: int = 0
    global_skipped: int = 0
    indices: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)

    @property
    def stop(self) -> int:
        """Position in the epoch after this global batch, in samples over all ranks: where a stopped run resumes."""
        return self.start + self.global_samples

    @property
    def weight(self) -> float:
        """This rank's share of the global batch: num_samples / (global_samples - global_skipped)."""
        return self.num_samples / max(1, self.global_samples - self.global_skipped)

    @property
    def valid(self) -> torch.Tensor:
        """Mask of the rows that are not padding: bool, shape (num_samples + num_padded,)."""
        device = next((tensor.device for tensor in self.fields.values()), None)
        return torch.arange(self.num_samples + self.num_padded, device=device) < self.num_samples

    def real(self) -> Batch:
        """Returns the batch without padding. Its tensors are views of the tensors of this batch."""
        if not self.num_padded:
            return self
        fields = {name: tensor[: self.num_samples] for name, tensor in self.fields.items()}
        indices = None if self.indices is None else self.indices[: self.num_samples]
        return replace(self, fields=fields, num_padded=0, indices=indices)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.fields.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]

    def split(self, num_parts: int) -> list[Batch]:
        """Splits the batch into micro-batches whose sizes differ by at most one row.

        The weights of the micro-batches add up to `weight`. If the batch has fewer rows than parts, some micro-batches
        are empty, so that every rank has `num_parts` micro-batches. Padding rows are split like other rows: the last
        micro-batches may consist of padding only.

        Args:
            num_parts: Number of micro-batches, at least 1.

        Returns:
            The micro-batches. Their tensors are views of the tensors of this batch.

        Raises:
            UsageError: If `num_parts` is below 1.
        """
        if num_parts < 1:
            raise UsageError(f"cannot split a batch into {num_parts} parts; at least 1 is needed")
        if num_parts == 1:
            return [self]
        rows = self.num_samples + self.num_padded
        spans = [rank_share(0, rows, rank=part, num_ranks=num_parts) for part in range(num_parts)]
        return [self._part(span) for span in spans]

    def _part(self, span: PositionRange) -> Batch:
        fields = {name: tensor[span.start : span.stop] for name, tensor in self.fields.items()}
        real = max(0, min(span.stop, self.num_samples) - span.start)
        indices = None if self.indices is None else self.indices[span.start : span.stop]
        return replace(
            self, fields=fields, num_samples=real, num_padded=span.num_samples - real, indices=indices
        )

    def to(
        self, device: torch.device | str, *, dtype: torch.dtype | None = None, non_blocking: bool = True
    ) -> Batch:
        """Returns the batch on a device.

        Args:
            device: The device.
            dtype: dtype of all floating-point fields; None: unchanged. Integer and bool fields are never converted.
            non_blocking: True if copies from pinned memory may overlap with computation on the device.
        """
        fields = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.fields.items()}
        if dtype is not None:
            # After the copy: a copy that also converts would convert on the CPU, into memory that is not pinned.
            fields = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in fields.items()
            }
        return replace(self, fields=fields)


# Reuses the memory of batches that were deleted: faulting in new pages costs more than filling them.


# Smaller tensors are allocated on the heap, which keeps its pages.
_SMALLEST_BYTES = 64 << 10

# With NumPy 1, PyTorch 2.3 may wait for ever if its first conversion of an array comes from two threads at once.
torch.from_numpy(np.empty(0))


class BatchMemory:
    """Allocates tensors, and reuses the memory of a tensor when nothing refers to that memory any more. Thread-safe.

    At most `kept_bytes` bytes of unused memory are kept.
    """

    def __init__(self, *, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes
        # No lock: the garbage collector may run `_take_back` in a thread that holds it. deque has its own lock.
        self._unused: dict[int, deque[NDArray[np.uint8]]] = {}

    def empty(self, shape: tuple[int, ...], *, dtype: np.dtype[np.generic]) -> torch.Tensor:
        """Returns an uninitialised tensor on the CPU."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _SMALLEST_BYTES:
            return torch.from_numpy(np.empty(shape, dtype=dtype))
        unused = self._unused.setdefault(num_bytes, deque())
        try:
            memory = unused.pop()
        except IndexError:
            memory = np.empty(num_bytes, dtype=np.uint8)
        # The tensor's storage refers to this array object, which so lives as long as any view of the tensor.
        array = memory.view(dtype).reshape(shape)
        comes_back = weakref.finalize(array, self._take_back, memory)
        comes_back.atexit = False  # type: ignore[misc]  # typeshed takes it for a slot
        return torch.from_numpy(array)

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        unused = self._unused[memory.nbytes]
        sizes = list(self._unused.items())
        if sum(size * len(those) for size, those in sizes) + memory.nbytes > self.kept_bytes:
            for size, those in sizes:  # buffers of other sizes, which may not be needed again
                if size != memory.nbytes:
                    those.clear()
        if (len(unused) + 1) * memory.nbytes <= self.kept_bytes:
            unused.append(memory)


# Copies each batch to the GPU in advance, on a separate stream, while the previous one is being processed.


T = TypeVar("T")


def batches_on(
    device: torch.device | str, batches: Iterable[Batch], *, dtype: torch.dtype | None = None
) -> Iterator[Batch]:
    """Yields the batches on `device`, in order. On a CUDA device the next batch is copied in advance.

    On a CUDA device batch k + 1 is copied on a separate stream while the caller works on batch k. So device memory
    must hold one batch more. The copies overlap with computation if the batches are in pinned memory
    (`Loader(..., pin_memory=True)`). On other devices no batch is taken in advance.

    `Loader.position` counts the batches that were taken from the loader. On a CUDA device this is one batch more than
    the caller has received. For a checkpoint use `batch.stop` of the last batch that was processed.

    Args:
        device: The device.
        batches: The batches, such as those of `Loader.epoch`.
        dtype: dtype of all floating-point fields; None: unchanged.
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
    """Yields the result of `begin(item)` for each item of `source`. Begins item k + 1 before it yields item k.

    `finish` is called with each result of `begin`, before the next item is begun. An error of `source` or `begin` for
    an item is raised when this item would be yielded.
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
    """Takes the next item of `source`, calls `begin(item)`, and returns its result in a tuple of one element.

    If `source` or `begin` raises an error, the error is returned instead. Returns None at the end of `source`.
    """
    try:
        for item in source:
            return (begin(item),)
    except Exception as error:  # the caller raises it in place of the item
        return error
    return None
