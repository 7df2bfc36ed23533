"""Recognizes errors that mean that a rank's memory is used up, and how much memory was requested."""

from __future__ import annotations

import gc
import re

import torch

# torch raises a RuntimeError where memory of the host is short, and libraries on a device have codes of their own.
_SIGNS = (
    "can't allocate memory",
    "annot allocate memory",
    "std::bad_alloc",
    "out of memory",
    "_STATUS_ALLOC_FAILED",
)
_ASKED = re.compile(r"(?:ried|nable) to allocate ([\d.]+) ?(bytes|[KMGTP]iB)")


def shortage(error: BaseException) -> str | None:
    """Returns the amount of memory that could not be allocated, such as "1.6 GiB"; "" if the error states no amount.

    Returns None if the error has another cause than lack of memory.
    """
    text = str(error)
    known = isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError))
    if not known and not (isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)):
        return None
    asked = _ASKED.search(text)
    if asked is None:
        return ""
    amount, unit = asked.groups()
    return in_binary_units(int(float(amount))) if unit == "bytes" else f"{float(amount):.1f} {unit}"


def in_binary_units(num_bytes: int) -> str:
    """Returns a text such as `1.6 GiB`, as torch and numpy write sizes."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def free_memory() -> None:
    """Frees what an error leaves behind: reference cycles, and the blocks that torch has cached on a device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def num_parts(rows: int, *, largest_part: int, at_least: int) -> int:
    """Returns the number of parts to divide `rows` into, so that no part has more than `largest_part` rows.

    at_least: smallest number of parts. This number is doubled as often as needed.
    """
    parts = at_least
    while -(-rows // parts) > largest_part:
        parts *= 2
    return parts
