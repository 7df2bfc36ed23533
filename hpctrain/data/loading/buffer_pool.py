"""Reuses the memory of batches that were deleted: faulting in new pages costs more than filling them."""

from __future__ import annotations

import math
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

# Smaller tensors are allocated on the heap, which keeps its pages.
_SMALLEST_BYTES = 64 << 10

# With NumPy 1, PyTorch 2.3 may wait for ever if its first conversion of an array comes from two threads at once.
torch.from_numpy(np.empty(0))


class BatchMemory:
    """Allocates tensors whose memory is reused when nothing refers to it any more. Thread-safe.

    kept_bytes: upper bound on unused memory that is kept.
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
