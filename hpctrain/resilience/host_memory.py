"""A limit of this process's own memory, and what becomes of memory that torch frees."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch import control_groups

# A limit of this process's own memory, below that of its control group.
#
# The kernel kills a process of a control group (a Slurm job with ConstrainRAMSpace, a container) whose
# memory is used up; no error can be handled then. With a lower limit of its own an allocation fails
# instead, with an error.


# Set for the ranks by `hpctrain supervise`: the number of the attempt before, if that ended out of memory.
OUT_OF_MEMORY_VARIABLE = "HPCTRAIN_OUT_OF_MEMORY"
# Of the group's memory: the rest is for what the limit does not count, as memory that ranks share.
USED_SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimit:
    """num_bytes: memory that all processes of a control group may use. group: its name."""

    num_bytes: int
    group: str


def read_group_limit(root: Path = Path("/")) -> GroupLimit | None:
    """Returns the smallest memory limit of this process's control groups; None if it is not below the machine's memory.

    root: directory with `proc` and `sys`.
    """
    found = []
    for folder, group in control_groups("memory", root=root):
        for name in ("memory.max", "memory.limit_in_bytes"):  # versions 2 and 1
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                found.append(GroupLimit(num_bytes=int(text), group=group))
    smallest = min(found, key=lambda limit: limit.num_bytes, default=None)
    # Version 1 has a number near 2^63 for "no limit".
    return smallest if smallest is not None and smallest.num_bytes < _machine_bytes(root) else None


def limit_own_memory(limit: GroupLimit, *, num_sharing: int) -> tuple[int, int]:
    """Limits this process's private memory to its share of a group that `num_sharing` ranks use.

    Returns this limit, and what the process uses already, in bytes. RLIMIT_DATA counts what the process maps for
    writing without sharing it: the heap, torch's tensors on the host, stacks of threads. What is mapped at this moment
    and was never written, as most data of torch's CUDA libraries, needs no memory: the limit allows it in addition.
    """
    share = int(USED_SHARE * limit.num_bytes / num_sharing)
    status = Path("/proc/self/status")
    mapped = _field_bytes(status, "VmData")
    try:
        used = min(mapped, _field_bytes(status, "RssAnon") + _field_bytes(status, "VmSwap"))
    except ValueError:  # a kernel that does not count them
        used = mapped
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    whole = share + mapped - used
    whole = whole if hard == resource.RLIM_INFINITY else min(whole, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (whole, hard))
    return whole - (mapped - used), used


def _machine_bytes(root: Path) -> int:
    return _field_bytes(root / "proc/meminfo", "MemTotal")


def _field_bytes(path: Path, name: str) -> int:
    """Returns the value of a field such as `VmData:  123 kB`."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no field {name}")


# What becomes of memory that torch frees on the host: kept for the next step, or given back to the system.
#
# glibc at first gives freed memory back in pieces of more than 128 KiB. A training step frees its
# activations and allocates as many again in the next step: the kernel then clears and maps each page again.
# Measured with digits on two ranks: half of all page faults, and 14 % of the samples a second. Where memory
# is short, kept memory does harm: a free block of one size is not used for others, nor by other threads.


# mallopt(3): requests of more bytes than the first are mapped alone; more free bytes than the second are given back.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES = 32 << 20  # the largest that glibc takes
_LARGE_BYTES = 1 << 20
_TRIM_BYTES = 256 << 20
_DEFAULT_BYTES = 128 << 10  # of both


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc keep up to 256 MiB of freed memory.

    Returns False, and changes nothing, if the user has set one of glibc's own variables (`MALLOC_TRIM_THRESHOLD_` and
    so on), or the C library is another one.
    """
    return _set_thresholds(_MMAP_BYTES, _TRIM_BYTES, environ=environ)


def give_back_large_pieces(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc give back all that it keeps, and from now on each piece of more than 1 MiB when it is freed.

    For a model whose blocks are gathered and freed again in each step: kept, pieces of many sizes with others between
    them are used again only in part, and a rank holds much more than it needs. Up to 256 MiB of smaller pieces, and of
    those that were made before, are kept. Returns False, and changes nothing, where `keep_freed_memory` does.
    """
    return _set_thresholds(_LARGE_BYTES, _TRIM_BYTES, environ=environ) and give_back_once(environ)


def give_back_once(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc give back all that it keeps now; what is freed later it keeps as before.

    For the end of the first update: the optimizer's state was made in what the activations of the first step had left,
    and pieces of that remain between its tensors which no later step can use. Returns False, and changes nothing, where
    `keep_freed_memory` does.
    """
    glibc = _glibc(environ)
    if glibc is not None:
        glibc.malloc_trim(0)
    return glibc is not None


def give_back_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc give back all that it keeps, and from now on each piece of more than 128 KiB when it is freed.

    Returns False, and changes nothing, where `keep_freed_memory` does.
    """
    return _set_thresholds(_DEFAULT_BYTES, _DEFAULT_BYTES, environ=environ) and give_back_once(environ)


def _set_thresholds(mmap_bytes: int, trim_bytes: int, *, environ: Mapping[str, str]) -> bool:
    glibc = _glibc(environ)
    return (
        glibc is not None
        and bool(glibc.mallopt(_M_MMAP_THRESHOLD, mmap_bytes))
        and bool(glibc.mallopt(_M_TRIM_THRESHOLD, trim_bytes))
    )


def _glibc(environ: Mapping[str, str]) -> ctypes.CDLL | None:
    """Returns the C library; None if it is another than glibc, or the user has set glibc's variables."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
