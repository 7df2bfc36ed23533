"""Memory for loaded tensors, in huge pages if the kernel provides them.

Allocating a page of 4 KiB takes longer than filling it: reading into new memory is several times as fast with pages of
2 MiB.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.format.dtypes import byte_view, dtype_named, empty_tensor
from hpctrain.errors import CheckpointError

_LARGE_PAGE_BYTES = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


def fresh_tensor(shape: tuple[int, ...], *, dtype: str) -> torch.Tensor:
    """Returns an uninitialized CPU tensor of this shape and dtype. Raises CheckpointError if there is no memory."""
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
    """Returns at least `num_bytes` bytes of memory, with huge pages requested for all whole ones in `num_bytes`; None
    if the system does not support it."""
    if _ADVICE is None:
        return None
    # If its length is a multiple of the huge page, the mapping is also aligned to one (Linux 6.7 and newer).
    length = -(-num_bytes // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    try:
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # for example, too many mappings
        return None
    # If refused, small pages are used. The end, of which only a part is used, stays in small pages.
    with suppress(OSError):
        memory.madvise(_ADVICE, 0, num_bytes // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES)
    return memory


def memory_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Returns the bytes of a contiguous CPU tensor: uint8, shape (num_bytes,), sharing the tensor's memory."""
    if tensor.dtype is torch.complex32:
        return byte_view(tensor).numpy()  # slower: suppresses torch's warnings about this dtype
    return tensor.reshape(-1).view(torch.uint8).numpy()
