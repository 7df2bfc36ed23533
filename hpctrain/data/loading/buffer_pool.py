"""Memory of batches, used again once a batch is gone: fresh pages cost more than filling them."""

from __future__ import annotations

import math
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

# Smaller ones come from the heap, which keeps its pages.
_SMALLEST_BYTES = 64 << 10


class BatchMemory:
    """Hands out tensors whose memory comes back when nothing refers to it any more. Safe in threads.

    kept_bytes: unused memory that is kept; what is beyond it is freed.
    """

    def __init__(self, *, kept_bytes: int) -> None:
        self.kept_bytes = kept_bytes
        # No lock: a tensor may die in the garbage collector, in a thread that is just here. deque has its own.
        self._unused: dict[int, deque[NDArray[np.uint8]]] = {}

    def empty(self, shape: tuple[int, ...], *, dtype: np.dtype[np.generic]) -> torch.Tensor:
        """An uninitialised tensor on the CPU."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _SMALLEST_BYTES:
            return torch.from_numpy(np.empty(shape, dtype=dtype))
        unused = self._unused.setdefault(num_bytes, deque())
        try:
            memory = unused.pop()
        except IndexError:
            memory = np.empty(num_bytes, dtype=np.uint8)
        # The tensor's storage holds this very array, so it lives as long as any view of the tensor.
        array = memory.view(dtype).reshape(shape)
        comes_back = weakref.finalize(array, self._take_back, memory)
        comes_back.atexit = False  # type: ignore[misc]  # typeshed takes it for a slot
        return torch.from_numpy(array)

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        unused = self._unused[memory.nbytes]
        sizes = list(self._unused.items())
        if sum(size * len(those) for size, those in sizes) + memory.nbytes > self.kept_bytes:
            for size, those in sizes:  # of other lengths, which may not come again
                if size != memory.nbytes:
                    those.clear()
        if (len(unused) + 1) * memory.nbytes <= self.kept_bytes:
            unused.append(memory)
