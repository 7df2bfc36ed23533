"""Memory for bytes on their way, used again: a page that is touched for the first time costs more than a copy."""

from __future__ import annotations

from typing import final

import torch

_ALIGNMENT = 64


@final
class ChunkMemory:
    """Hands out uint8 tensors. What a reduction has taken it gives back as a whole, when it is over."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._made: list[
            torch.Tensor
        ] = []  # lives as long as this does: messages may be on their way into it

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
    """What one chunk has taken."""

    def __init__(self, memory: ChunkMemory) -> None:
        self._memory = memory
        self._taken: list[torch.Tensor] = []

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """Shape (num_bytes,), uint8, aligned to 64 bytes, not zeroed."""
        # Few sizes, so that chunks of nearly one length use the same memory.
        capacity = _ALIGNMENT << max(0, (max(1, num_bytes) - 1) // _ALIGNMENT).bit_length()
        buffer = self._memory.take(capacity)
        self._taken.append(buffer)
        return buffer[:num_bytes]

    def values(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        """Shape (numel,), of `dtype`, not zeroed."""
        return self.bytes(numel * dtype.itemsize).view(dtype)

    def end(self) -> None:
        for buffer in self._taken:
            self._memory.give_back(buffer)
        self._taken.clear()
