"""Host copies of device buffers, for libraries that only read host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def to_host(buffer: torch.Tensor) -> torch.Tensor:
    """Returns `buffer`, of any shape and dtype, itself if it is in host memory; else a copy, in page-locked memory if
    it comes from CUDA."""
    if buffer.device.type == "cpu":
        return buffer
    staged = torch.empty_like(buffer, device="cpu", pin_memory=buffer.device.type == "cuda")
    return staged.copy_(buffer)


@contextlib.contextmanager
def on_host(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields `buffer` in host memory; a copy is written back to `buffer` at the end."""
    staged = to_host(buffer)
    yield staged
    if staged is not buffer:
        buffer.copy_(staged)
