"""Keeps memory that torch frees for the next step, instead of giving it back to the system.

glibc at first gives freed memory back in pieces of more than 128 KiB. A training step frees its activations and
allocates as many again in the next step: the kernel then clears and maps each page again. Measured with digits on two
ranks: half of all page faults, and 14 % of the samples a second.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# mallopt(3): requests of more bytes than the first are mapped alone; more free bytes than the second are given back.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES = 32 << 20  # the largest that glibc takes
_TRIM_BYTES = 256 << 20


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Has glibc keep up to 256 MiB of freed memory. Returns False, and changes nothing, where the user has set one of
    glibc's own variables (`MALLOC_TRIM_THRESHOLD_` and so on), or the C library is another one."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
