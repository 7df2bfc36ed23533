"""Drops files from the page cache, and reports which fraction of their pages is cached. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from hpctrain.errors import DataError


class Cache(str, Enum):
    """The state of the page cache.

    WARM: the cache keeps what earlier rounds read. COLD: the files are evicted before each reading.
    """

    WARM = "warm"
    COLD = "cold"


def evict(paths: Iterable[Path]) -> None:
    """Asks the kernel to drop these files' pages from the page cache. Pages that a process has mapped stay there.

    Raises DataError if a file cannot be opened, flushed or dropped.
    """
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)  # dirty pages cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"{path} cannot be dropped from the page cache: {error.strerror}") from error


def cached_share(paths: Iterable[Path]) -> float | None:
    """Returns the fraction of these files' pages that are in the page cache, 0 to 1; None if mincore is unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore") or not hasattr(libc, "mmap"):
        return None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = resident = 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        finally:
            os.close(descriptor)
        if address in (None, ctypes.c_void_p(-1).value):
            return None
        count = -(-size // mmap.PAGESIZE)
        vector = ctypes.create_string_buffer(count)
        failed = libc.mincore(address, size, vector)
        libc.munmap(address, size)
        if failed:
            return None
        pages += count
        resident += sum(byte & 1 for byte in vector.raw[:count])
    return resident / pages if pages else 0.0
