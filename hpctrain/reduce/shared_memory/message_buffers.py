"""Pool of message buffers. Memory is reused, since the first access to a page costs more than a copy."""

from __future__ import annotations

from typing import final

import torch

_ALIGNMENT = 64


@final
class ChunkMemory:
    """Pool of uint8 tensors. A chunk takes buffers through a `Loan`, which returns all of them at its end."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._made: list[
            torch.Tensor
        ] = []  # keeps all buffers alive, since messages may still arrive in them

    def loan(self) -> Loan:
        return Loan(self)

    def take(self, capacity: int) -> torch.Tensor:
        free = self._free.get(capacity)
        if free:
            return free.pop()
        self._made.append(torch.empty(capacity, dtype=torch.uint8))
        return self._made[-1]

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)


@final
class Loan:
    """Buffers that one chunk has taken from the pool. `end` returns them."""

    def __init__(self, memory: ChunkMemory) -> None:
        self._memory = memory
        self._taken: list[torch.Tensor] = []

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """Returns a tensor of shape (num_bytes,), uint8, aligned to 64 bytes, not zeroed."""
        # Few distinct sizes, so that chunks of similar length reuse the same memory.
        capacity = _ALIGNMENT << max(0, (max(1, num_bytes) - 1) // _ALIGNMENT).bit_length()
        buffer = self._memory.take(capacity)
        self._taken.append(buffer)
        return buffer[:num_bytes]

    def values(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of shape (numel,), `dtype`, not zeroed."""
        return self.bytes(numel * dtype.itemsize).view(dtype)

    def end(self) -> None:
        for buffer in self._taken:
            self._memory.give_back(buffer)
        self._taken.clear()
