"""What the operating system says of the processes of a node's ranks, whatever these say themselves."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

GONE = "has ended"
STOPPED = "is stopped"
_IN_KERNEL = "waits in the kernel, as for a file"
_STATES = {
    psutil.STATUS_STOPPED: STOPPED,
    psutil.STATUS_TRACING_STOP: STOPPED,
    psutil.STATUS_ZOMBIE: GONE,
    psutil.STATUS_DEAD: GONE,
    psutil.STATUS_DISK_SLEEP: _IN_KERNEL,
    psutil.STATUS_SLEEPING: "sleeps",
    psutil.STATUS_IDLE: "sleeps",
    psutil.STATUS_RUNNING: "computes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a process does. state: for the reader, "" if it is not known. cpu_s: processor time of it and of processes
    that it started, as compilers. looked: when that was so (epoch)."""

    state: str
    cpu_s: float
    looked: float

    @property
    def may_be_hung(self) -> bool:
        """False for what the operating system itself is busy with, and for what computes now."""
        return self.state in (GONE, STOPPED, "sleeps")

    @property
    def is_over(self) -> bool:
        """True if the process is stopped, until it is continued by a signal, or gone."""
        return self.state in (GONE, STOPPED)


def activities(pids: Iterable[int]) -> dict[int, Activity]:
    """Returns what the processes `pids` of this node do. Costs some milliseconds for each 100 processes of the node."""
    started: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        started[process.info["ppid"]].append(process)
    return {pid: _activity(pid, started, now=time.time()) for pid in pids}


def _activity(pid: int, started: dict[int, list[psutil.Process]], *, now: float) -> Activity:
    try:
        process = psutil.Process(pid)
        state, cpu_s = _STATES.get(process.status(), ""), _cpu_s(process)
    except psutil.NoSuchProcess:
        return Activity(state=GONE, cpu_s=0.0, looked=now)
    except psutil.Error:
        return Activity(state="", cpu_s=0.0, looked=now)
    descendants, seen = list(started[pid]), {pid}
    while descendants:
        child = descendants.pop()
        if child.pid not in seen:  # a number may have been given to another process meanwhile
            seen.add(child.pid)
            cpu_s += _cpu_s(child)
            descendants += started[child.pid]
    return Activity(state=state, cpu_s=cpu_s, looked=now)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
