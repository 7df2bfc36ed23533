"""A limit of this process's own memory, below that of its control group.

The kernel kills a process of a control group (a Slurm job with ConstrainRAMSpace, a container) whose memory is used up;
no error can be handled then. With a lower limit of its own an allocation fails instead, with an error.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch import control_groups

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
