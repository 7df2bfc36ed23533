"""Per-thread scratch memory for one piece of a tensor at a time, small enough to stay in cache."""

from __future__ import annotations

import threading

import torch

# Number of values of a piece, a multiple of every codec's block. 512 KB of float32: fits into the second-level
# cache, and large enough to make the microseconds of each torch call negligible.
PIECE = 1 << 17

_of_thread = threading.local()


def scratch(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns this thread's scratch tensor `name` of `dtype`, shape (PIECE,), with arbitrary contents."""
    key = f"{name} {dtype}"
    found: torch.Tensor | None = getattr(_of_thread, key, None)
    if found is None:
        found = torch.empty(PIECE, dtype=dtype)
        setattr(_of_thread, key, found)
    return found
