"""Limits this process's own memory, and controls whether memory that torch frees is returned to the system.

A limit: the kernel kills a process of a control group (a Slurm job with ConstrainRAMSpace, a container) whose memory
is used up, and no error can be handled then. With a lower limit of the process itself, an allocation fails instead,
with an error.

Freed memory: by default glibc returns freed memory to the system in pieces of more than 128 KiB. A training step
frees its activations and allocates as many again in the next step, so the kernel clears and maps each page again.
In a measurement with the example `digits` on two ranks, this caused half of all page faults, and cost 14 % of the
samples per second. If memory is short, keeping freed memory does harm: a free block of one size is not used for
other sizes, nor by other threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch import control_groups

# Set for the ranks by `hpctrain supervise`: the number of the previous attempt, if that ran out of memory.
OUT_OF_MEMORY_VARIABLE = "HPCTRAIN_OUT_OF_MEMORY"
# Share of the group's memory: the rest is for what the limit does not count, such as memory that ranks share.
USED_SHARE = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimit:
    """Memory limit of a control group: `num_bytes` for all its processes together. `group` is its name."""

    num_bytes: int
    group: str


def read_group_limit(root: Path = Path("/")) -> GroupLimit | None:
    """Returns the smallest memory limit of this process's control groups.

    Returns None if no limit is below the machine's memory.

    root: directory that contains `proc` and `sys`.
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
    """Limits this process's private memory to its share of a control group's limit.

    num_sharing: number of ranks that share the group's memory.

    Returns this limit, and the private memory that the process already uses, both in bytes. RLIMIT_DATA counts private
    memory that is mapped for writing: the heap, torch's tensors on the host, thread stacks. Memory that is mapped at
    this moment but was never written, like most data of torch's CUDA libraries, uses no physical memory; it is allowed
    in addition to the share.
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
    """Returns the value of a field such as `VmData:  123 kB` in a file of /proc, in bytes."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no field {name}")


# mallopt(3). MMAP: requests of more bytes are mapped separately. TRIM: more free bytes than this are returned.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES = 32 << 20  # the largest that glibc takes
_LARGE_BYTES = 1 << 20
_TRIM_BYTES = 256 << 20
_DEFAULT_BYTES = 128 << 10  # default of both


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc keep up to 256 MiB of freed memory.

    Returns False, and changes nothing, if the user has set one of glibc's own variables (`MALLOC_TRIM_THRESHOLD_` and
    so on), or if the C library is not glibc.
    """
    return _set_thresholds(_MMAP_BYTES, _TRIM_BYTES, environ=environ)


def give_back_large_pieces(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc return all freed memory to the system now, and later each freed piece of more than 1 MiB at once.

    Call it for a model with sharded blocks, which are gathered from the ranks and freed again in each step. Freed
    pieces of memory of many sizes, with pieces in use between them, would be used again only in part, and a rank would
    hold much more memory than it needs. Up to 256 MiB of smaller pieces, and of pieces allocated before this call, are
    still kept. Returns False, and changes nothing, if the user has set one of glibc's own variables, or if the C
    library is not glibc.
    """
    return _set_thresholds(_LARGE_BYTES, _TRIM_BYTES, environ=environ) and give_back_once(environ)


def give_back_once(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc return all freed memory to the system now; memory that is freed later is kept as before.

    Call it at the end of the first update: the optimizer's state was allocated in the memory that the activations of
    the first step had left, and the pieces that remain between its tensors are of no use to later steps. Returns False,
    and changes nothing, if the user has set one of glibc's own variables, or if the C library is not glibc.
    """
    glibc = _glibc(environ)
    if glibc is not None:
        glibc.malloc_trim(0)
    return glibc is not None


def give_back_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Makes glibc return all freed memory to the system now, and later each freed piece of more than 128 KiB at once.

    Returns False, and changes nothing, if the user has set one of glibc's own variables, or if the C library is not
    glibc.
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
    """Returns the C library; None if it is not glibc, or the user has set glibc's variables."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
