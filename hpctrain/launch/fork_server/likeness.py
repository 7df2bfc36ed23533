"""Compares how two processes were started: a rank can be forked from a server only if both were started alike."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Variables that differ between ranks and that nothing reads before a rank's own work begins. All others must be equal:
# the dynamic linker, allocators, OpenMP and Python read theirs when a process starts.
_PER_RANK = re.compile(
    r"(PMIX|PMI|OMPI|OPAL|ORTE|PRTE|MPI|MPIR|HYDRA|HYDI|I_MPI|MV2|MVP|SLURM|SLURMD|PALS|ALPS|FLUX|JSM|HPCTRAIN)_.*|PMI_.*"
    r"|MPI_LOCAL.*|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|ZE_AFFINITY_MASK|GPU_DEVICE_ORDINAL|PWD|OLDPWD|SHLVL|_"
    r"|TMPDIR|TEMP|TMP"  # where TMPDIR is not set, Slurm sets it for the first task of each node only
)
_NAMESPACES = ("mnt", "pid", "net", "uts", "ipc", "user", "cgroup")
# Slurm creates a control group per task of a step; its limits are those of the step, except for GPUs of single tasks.
_TASK = re.compile(r"/task_(\d+|special)(?=/|$)", re.MULTILINE)
_GPUS_OF_TASKS = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
# Fields of /proc/PID/status with the identity and the rights of a process.
_STATUS = (
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Mems_allowed_list",
)


def is_per_rank(name: str) -> bool:
    """Returns True if an environment variable may differ between a server and the ranks forked from it. Pure."""
    return _PER_RANK.fullmatch(name) is not None


def read_environ(pid: int) -> dict[str, str]:
    """Returns the environment variables at the start of a process. Raises OSError."""
    items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(item).partition("=") for item in items if b"=" in item)
    return {name: value for name, _, value in pairs}


def read_command(client: int) -> list[str]:
    """Returns the command line of the rank that a fork server's client stands for. Raises OSError, ValueError."""
    words = [os.fsdecode(word) for word in Path(f"/proc/{client}/cmdline").read_bytes().split(b"\0")[:-1]]
    return words[words.index("--") + 1 :]


def read_status(pid: int) -> dict[str, str]:
    """Returns the fields of /proc/PID/status. Raises OSError."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.strip() for name, _, value in lines}


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """The properties of a process that must be equal in a fork server and in the rank that it forks.

    `cgroups` omits the path components that Slurm adds per task.
    """

    environ: Mapping[str, str]
    status: Mapping[str, str]
    namespaces: Mapping[str, str]
    root: str
    cgroups: str
    policy: str
    hard_limits: tuple[int, ...]
    scheduling: tuple[int, int]
    nice: int
    out_of_memory_score: int

    @classmethod
    def of(cls, pid: int) -> Likeness:
        """Reads the properties of a process. Raises OSError if the process has ended or belongs to another user."""
        status, environ = read_status(pid), read_environ(pid)
        cgroups = Path(f"/proc/{pid}/cgroup").read_text()
        return cls(
            environ={name: value for name, value in environ.items() if not is_per_rank(name)},
            status={name: status.get(name, "") for name in _STATUS},
            namespaces={name: _link(pid, f"ns/{name}") for name in _NAMESPACES},
            root=_link(pid, "root"),
            cgroups=cgroups if any(environ.get(name) for name in _GPUS_OF_TASKS) else _TASK.sub("", cgroups),
            policy=_memory_policy(pid),
            hard_limits=tuple(resource.prlimit(pid, limit)[1] for limit in limits()),
            scheduling=(os.sched_getscheduler(pid), os.sched_getparam(pid).sched_priority),
            nice=os.getpriority(os.PRIO_PROCESS, pid),
            out_of_memory_score=int(Path(f"/proc/{pid}/oom_score_adj").read_text()),
        )

    def why_unlike(self, other: Likeness) -> str | None:
        """Returns why `other` cannot be forked from this process; None if forking is possible. Pure."""
        names = sorted(
            name
            for name in {*self.environ, *other.environ}
            if self.environ.get(name) != other.environ.get(name)
        )
        if names:
            return f"the environment variable {', '.join(names[:3])} differs between ranks of this node"
        for name, value in self.status.items():
            if other.status[name] != value:
                return f"{name} in /proc/PID/status differs between ranks of this node"
        if self.namespaces != other.namespaces or self.root != other.root:
            return "ranks of this node are in different namespaces"
        if self.cgroups != other.cgroups:
            return "ranks of this node are in different control groups"
        if self.policy != other.policy:
            return "the memory policy differs between ranks of this node"
        if any(_less(mine, theirs) for mine, theirs in zip(self.hard_limits, other.hard_limits, strict=True)):
            return "a rank of this node may have more of a resource than another (ulimit -H)"
        if self.scheduling != other.scheduling:
            return "ranks of this node are scheduled by different policies (chrt)"
        if other.nice < self.nice or other.out_of_memory_score < self.out_of_memory_score:
            return "a rank of this node has a higher priority than another"
        return None


def limits() -> list[int]:
    """Returns the resource limits of Linux, as constants of the module `resource`."""
    return [
        getattr(resource, name)
        for name in sorted(dir(resource))
        if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
    ]


def _less(mine: int, theirs: int) -> bool:
    if mine == resource.RLIM_INFINITY:
        return False
    return theirs == resource.RLIM_INFINITY or mine < theirs


def _link(pid: int, name: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except FileNotFoundError:
        return ""


def _memory_policy(pid: int) -> str:
    """Returns the NUMA policy of a process's first mapping, which is its default; empty without NUMA."""
    try:
        with open(f"/proc/{pid}/numa_maps") as file:
            return file.readline().split()[1]
    except (FileNotFoundError, IndexError):
        return ""
