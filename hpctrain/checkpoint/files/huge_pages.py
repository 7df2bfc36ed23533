"""Memory for what is loaded, in large pages where the kernel gives them.

To get a page of 4 KiB costs more than to fill it: reading into fresh memory is several times as fast with pages of
2 MiB.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import numpy as np
import torch

from hpctrain.checkpoint.format.dtypes import byte_view, dtype_named, empty_tensor
from hpctrain.errors import CheckpointError

_LARGE_PAGE_BYTES = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


def fresh_tensor(shape: tuple[int, ...], *, dtype: str) -> torch.Tensor:
    """A CPU tensor of this shape and dtype, its content not set. Raises CheckpointError where memory lacks."""
    kind = dtype_named(dtype)
    num_bytes = math.prod(shape) * kind.itemsize
    if num_bytes >= 2 * _LARGE_PAGE_BYTES and kind is not torch.complex32:
        memory = in_large_pages(num_bytes)
        if memory is not None:
            return torch.frombuffer(memory, dtype=kind, count=math.prod(shape)).reshape(shape)
    try:
        return empty_tensor(shape, dtype=dtype) if kind is torch.complex32 else torch.empty(shape, dtype=kind)
    except RuntimeError as error:
        raise CheckpointError(f"there is no memory for a tensor of {num_bytes} bytes: {error}") from error


def in_large_pages(num_bytes: int) -> mmap.mmap | None:
    """Memory whose whole large pages are asked for as such; None where the system gives none."""
    if _ADVICE is None:
        return None
    # A mapping whose length is a multiple of the large page begins at one, too (Linux 6.7 and newer).
    length = -(-num_bytes // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    try:
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many mappings, perhaps
        return None
    with suppress(
        OSError
    ):  # refused: small pages do as well. The end is left in small ones: it is not all used.
        memory.madvise(_ADVICE, 0, num_bytes // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES)
    return memory


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor, shape (num_bytes,): what is written there is in the tensor."""
    if tensor.dtype is torch.complex32:
        return byte_view(tensor).numpy()  # at a price: torch warns of this type at every touch
    return tensor.reshape(-1).view(torch.uint8).numpy()
