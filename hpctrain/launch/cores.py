"""The cores that a rank may use, and the rank's share of the cores that other ranks may use too.

A core has one or more hardware threads, which the kernel calls CPUs. A rank's affinity may be all CPUs of its machine,
the CPUs that the launcher has bound to this rank alone, or anything between.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCores:
    """CPUs and cores that one rank may use.

    host: name of the machine.
    cpus: numbers of the hardware threads in the rank's affinity.
    cores: cores of these threads, each identified by its lowest hardware thread.
    limit: CPU seconds per second that the rank's control group may use; None if there is no limit.
    limit_group: name of that control group. All ranks in the group share the limit.
    """

    host: str
    cpus: frozenset[int]
    cores: frozenset[int]
    limit: float | None = None
    limit_group: str = ""

    def to_json(self) -> list[Any]:
        """Returns a compact form of JSON values: about 50 bytes, even for hundreds of cores."""
        return [self.host, _to_spans(self.cpus), _to_spans(self.cores), self.limit, self.limit_group]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> RankCores:
        host, cpus, cores, limit, group = value
        return cls(
            host=host, cpus=_from_spans(cpus), cores=_from_spans(cores), limit=limit, limit_group=group
        )


def core_share(ranks: Sequence[RankCores], rank: int) -> Fraction:
    """Returns the number of cores for `rank` if each core is shared evenly by the ranks that may use it.

    If the control group of `rank` has a CPU limit, the number is at most the even share of one rank in that limit.

    ranks: cores of each rank of the run.
    """
    return _share(ranks, rank, lambda found: found.cores)


def cpu_share(ranks: Sequence[RankCores], rank: int) -> Fraction:
    """Returns the share of `rank` as `core_share` does, but counted in hardware threads."""
    return _share(ranks, rank, lambda found: found.cpus)


def _share(
    ranks: Sequence[RankCores], rank: int, units_of: Callable[[RankCores], frozenset[int]]
) -> Fraction:
    mine = ranks[rank]
    neighbours = [found for found in ranks if found.host == mine.host]
    # Most ranks of a host have the same affinity: count each only once.
    counts: dict[frozenset[int], int] = {}
    for found in neighbours:
        counts[units_of(found)] = counts.get(units_of(found), 0) + 1
    share = Fraction(0)
    for unit in units_of(mine):
        share += Fraction(1, sum(count for units, count in counts.items() if unit in units))
    if mine.limit is not None:
        sharing = sum(found.limit_group == mine.limit_group for found in neighbours)
        share = min(share, Fraction(mine.limit) / sharing)
    return share


def num_cpus_of_host(ranks: Sequence[RankCores], host: str) -> int:
    """Returns the number of hardware threads that the ranks of a host share.

    If all ranks of the host are under one CPU limit, the number is at most this limit.
    """
    there = [found for found in ranks if found.host == host]
    num_cpus = len(frozenset().union(*(found.cpus for found in there)))
    limits = {(found.limit_group, found.limit) for found in there}
    ((_, limit), *others) = limits
    return num_cpus if others or limit is None else max(1, min(num_cpus, int(limit)))


def read_cores(root: Path = Path("/")) -> RankCores:
    """Reads which cores this process may use. root: directory that contains `proc` and `sys`."""
    cpus = frozenset(os.sched_getaffinity(0))
    limit, group = _read_limit(root)
    return RankCores(
        host=socket.gethostname(),
        cpus=cpus,
        cores=frozenset(_core_of(cpu, root) for cpu in cpus),
        limit=limit,
        limit_group=group,
    )


def _core_of(cpu: int, root: Path) -> int:
    """Returns the lowest hardware thread of the core of `cpu`; `cpu` itself if the kernel does not report it."""
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return min(_from_spans(text)) if text else cpu
    except ValueError:
        return cpu


def _read_limit(root: Path) -> tuple[float | None, str]:
    """Returns the smallest CPU limit of this process's control groups, and the name of the group that sets the limit.

    The limit is in CPU seconds per second. Returns (None, "") if there is no limit.
    """
    found: list[tuple[float, str]] = []
    for folder, group in control_groups("cpu", root=root):
        for limit in (_limit_of_version_2(folder), _limit_of_version_1(folder)):
            if limit is not None:
                found.append((limit, group))
    return min(found) if found else (None, "")


def control_groups(controller: str, *, root: Path = Path("/")) -> Iterator[tuple[Path, str]]:
    """Yields the control groups that may limit this process's use of a resource: folder and name of each group.

    These are groups of cgroup version 1 and 2: first the process's own group, then the groups above that group.

    controller: `cpu` or `memory`.
    root: directory that contains `proc` and `sys`.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        groups = root / "sys/fs/cgroup"
        if not controllers:  # version 2
            mounts = (groups, groups / "unified")
        elif controller in controllers.split(","):
            mounts = (groups / controllers, groups / controller)
        else:
            continue
        # In a container the path may be that of the host, and only its root may be mounted.
        place = Path("/", path.lstrip("/"))
        for mount in mounts:
            for above in (place, *place.parents):
                yield mount / above.relative_to("/"), str(above)


def _limit_of_version_2(group: Path) -> float | None:
    return _ratio(_read(group / "cpu.max").split())


def _limit_of_version_1(group: Path) -> float | None:
    return _ratio([_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")])


def _ratio(words: Sequence[str]) -> float | None:
    """Returns quota divided by period; None if there is no limit (`max` or -1), or the words are not two numbers."""
    try:
        quota, period = (int(word) for word in words)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _to_spans(numbers: frozenset[int]) -> str:
    """Returns a text such as `0-7,16`, in the format of the kernel's files."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda entry: entry[1] - entry[0])
    spans = ([number for _, number in run] for _, run in runs)
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


@cache
def _from_spans(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for span in filter(None, text.split(",")):
        first, _, last = span.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
