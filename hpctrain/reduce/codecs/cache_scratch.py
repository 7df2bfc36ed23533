"""Memory in which a thread works on one piece of a tensor at a time: small enough to stay in cache."""

from __future__ import annotations

import threading

import torch

# Values worked on at a time, a multiple of every codec's block. 512 KB of float32: within the second-level
# cache, and large enough that the microseconds that each call of torch costs do not count.
PIECE = 1 << 17

_of_thread = threading.local()


def scratch(name: str, dtype: torch.dtype) -> torch.Tensor:
    """This thread's memory of that name, shape (PIECE,); it holds whatever was left there."""
    key = f"{name} {dtype}"
    found: torch.Tensor | None = getattr(_of_thread, key, None)
    if found is None:
        found = torch.empty(PIECE, dtype=dtype)
        setattr(_of_thread, key, found)
    return found
