"""What was started, in a file: enough for another process to end just that, whatever became of the owner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

_FILE = "cluster.json"


class ClusterError(Exception):
    """The cluster could not be brought up, or did not do what was asked."""


class Lifetime(str, Enum):
    """OWNER: stale once the process that made it is gone. KEPT: until somebody takes it down."""

    OWNER = "owner"
    KEPT = "kept"


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that cannot be confused with a later one of the same id. `started`: ticks since boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid=pid, started=_start_ticks(pid))

    @property
    def alive(self) -> bool:
        try:
            return _start_ticks(self.pid) == self.started and _state(self.pid) not in "ZX"
        except OSError:
            return False

    def kill(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(kw_only=True)
class Record:
    """`places`: the first process of each place, the head's first. `namespaces`: its network namespace."""

    num_nodes: int
    rate: str | None
    cores_per_node: int
    lifetime: Lifetime
    owner: Process
    places: dict[str, Process] = field(default_factory=dict)
    namespaces: dict[str, int] = field(default_factory=dict)
    ready: bool = False
    volumes: list[str] = field(default_factory=list)

    @property
    def stale(self) -> bool:
        """Nobody will use or end it any more: its owner is gone, and it was not meant to outlive it."""
        return not self.owner.alive and (self.lifetime is Lifetime.OWNER or not self.ready)

    def write(self, directory: Path) -> None:
        text = json.dumps(asdict(self), indent=1)
        temporary = directory / f"{_FILE}.new"
        temporary.write_text(text)
        temporary.replace(directory / _FILE)

    @classmethod
    def read(cls, directory: Path) -> Record | None:
        """None when there is no cluster in `directory`."""
        try:
            fields = json.loads((directory / _FILE).read_text())
        except FileNotFoundError:
            return None
        fields["lifetime"] = Lifetime(fields["lifetime"])
        fields["owner"] = Process(**fields["owner"])
        fields["places"] = {name: Process(**process) for name, process in fields["places"].items()}
        return cls(**fields)


def namespace_of(pid: int, kind: str) -> int:
    """Number of the namespace of `kind` (`net`, `pid`) that a process is in."""
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino


def processes_in(namespaces: set[int], kind: str = "net") -> list[int]:
    """Live processes in these namespaces. Zombies have none, and are not found."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if namespace_of(int(name), kind) in namespaces:
                    found.append(int(name))
    return found


def end(directory: Path, *, timeout_s: float = 60.0) -> None:
    """End the cluster in `directory` and remove its files. Nothing is done where there is none.

    The first process of the head is the first of a process namespace that all others are in, so the kernel
    ends them with it; network namespaces and links go with their last process.
    """
    record = Record.read(directory)
    if record is not None:
        for process in record.places.values():
            process.kill()
        namespaces = set(record.namespaces.values())
        deadline_s = time.monotonic() + timeout_s
        while left := [p.pid for p in record.places.values() if p.alive] + processes_in(namespaces):
            if time.monotonic() > deadline_s:
                raise ClusterError(f"processes {left} of the cluster in {directory} do not end")
            time.sleep(0.02)
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Hold the lock beside `directory`: clusters go up and down in turns, so also two of one name."""
    import fcntl

    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stat_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _start_ticks(pid: int) -> int:
    return int(_stat_fields(pid)[19])


def _state(pid: int) -> str:
    return _stat_fields(pid)[0]
