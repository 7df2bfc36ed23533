"""Who holds a lease, and whether that process still runs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds a lease.

    boot, namespace, ticks: of the machine's start, the process's namespace and its start: process numbers are used
    again. job, restart: Slurm's job and how often it was queued again; "" without. attempt: of `hpctrain supervise`;
    0 without. since: Unix time, on the holder's clock; for people only.
    """

    id: str
    host: str
    pid: int
    boot: str
    namespace: str
    ticks: int
    job: str
    restart: int
    attempt: int
    since: float

    @classmethod
    def of_this_process(cls, id: str, *, environ: Mapping[str, str] = os.environ) -> Holder:
        return cls(
            id=id,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=_text("/proc/sys/kernel/random/boot_id"),
            namespace=_namespace("self"),
            ticks=_state_and_ticks(os.getpid())[1],
            job=environ.get("SLURM_JOB_ID", ""),
            restart=_number(environ.get("SLURM_RESTART_COUNT")),
            attempt=_number(environ.get("HPCTRAIN_ATTEMPT")),
            since=time.time(),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Holder:
        """Raises KeyError, TypeError or ValueError for what no holder has written."""
        return cls(**{f.name: type_of(value[f.name]) for f, type_of in zip(fields(cls), _TYPES, strict=True)})

    def has_ended(self, *, seen_by: Holder) -> bool | None:
        """Returns whether this process has ended, as far as `seen_by`, the process that asks, can tell; else None.

        It has if there is no such process on its machine any more, if Slurm has queued its job again since, or if the
        supervisor has begun a later attempt in the same job. It has not if it is the later one, and `seen_by` is of a
        life of the job that Slurm has given up.
        """
        if self.job and self.job == seen_by.job:
            if self.restart != seen_by.restart:
                return self.restart < seen_by.restart
            if self.attempt and seen_by.attempt and self.attempt != seen_by.attempt:
                return self.attempt < seen_by.attempt
        if not self.shares_machine(seen_by):
            # Another machine, perhaps of the same name, or the same one after it was started again.
            return None
        state, ticks = _state_and_ticks(self.pid)
        if not state:
            # /proc may hide the processes of other users (`hidepid`).
            return None if _exists(self.pid) else True
        return state in ("Z", "X") or ticks != self.ticks

    @property
    def process(self) -> tuple[str, str, str, int, int]:
        """What no other process has."""
        return self.host, self.boot, self.namespace, self.pid, self.ticks

    def shares_machine(self, other: Holder) -> bool:
        """Returns whether both processes see each other's process numbers."""
        return self.process[:3] == other.process[:3]

    def describe(self) -> str:
        """Returns text such as `process 4711 on node3 (Slurm job 12), since 2026-01-31 12:00:00`."""
        job = f" (Slurm job {self.job})" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}{job}, since {since}"


_TYPES = (str, str, int, str, str, int, str, int, int, float)


def _state_and_ticks(pid: int) -> tuple[str, int]:
    """Returns the state of a process, "" if there is none, and its start in clock ticks since the machine's."""
    text = _text(f"/proc/{pid}/stat")
    after_name = text.rpartition(")")[2].split()
    return (after_name[0], int(after_name[19])) if len(after_name) > 19 else ("", 0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def _namespace(process: str) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/pid")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
