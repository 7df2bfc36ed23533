"""Host memory that holds a copy of a rank's state while it is being written in the background."""

from __future__ import annotations

from typing import final

import torch


@final
class HostBuffers:
    """Memory for one save at a time, kept for the next one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory held."""
        return self._memory.numel()

    def take(self, num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
        """`num_bytes` bytes, shape (num_bytes,), their content not set. What was taken before is used again.

        pinned: for copies from a CUDA device, which are faster into pinned memory and do not wait for each other.
        """
        if num_bytes > self._memory.numel() or (pinned and not self._memory.is_pinned()):
            self.release()  # before more is asked for
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._memory.zero_()  # page faults now, not in the first copy of every page
        return self._memory[:num_bytes]

    def release(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)
