"""Notices at once when a process of another rank on this machine ends: by the kernel's process descriptors (pidfd)."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

# Set for the ranks of an elastic run, by its supervisor: the range of their number, such as 2:4.
ELASTIC_VARIABLE = "HPCTRAIN_ELASTIC"
# Set for the ranks of an elastic run: a datagram socket of the supervisor, to which ranks on the same machine report
# losses. mpirun, which passes on what ranks print, does nothing for two seconds when a rank has died.
NOTICES_VARIABLE = "HPCTRAIN_NOTICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process of a rank, described so that another process can tell whether it sees the same process.

    machine: identifier of the machine's boot. namespace: namespace of process ids. ticks: start of the process, in
    clock ticks since the boot.
    """

    machine: str
    namespace: str
    pid: int
    ticks: int

    @classmethod
    def of_this_process(cls) -> RankProcess:
        return cls(
            machine=_text(Path("/proc/sys/kernel/random/boot_id")), namespace=_namespace(), pid=os.getpid(),
            ticks=_ticks(os.getpid()),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def open(self) -> int | None:
        """Returns a process descriptor; None if this process does not see that process, or the kernel has none."""
        here = (_text(Path("/proc/sys/kernel/random/boot_id")), _namespace())
        if (self.machine, self.namespace) != here:
            return None
        try:
            found = os.pidfd_open(self.pid)
        except (OSError, AttributeError):
            return None
        if _ticks(self.pid) == self.ticks:
            return found
        os.close(found)
        return None


def print_notice(text: str) -> None:
    """Prints a line in one piece, from any thread: through the supervisor if that runs on this machine."""
    line = f"hpctrain: {text}\n".encode()
    path = os.environ.get(NOTICES_VARIABLE)
    if path:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.setblocking(False)
            notices.sendto(line, path)
            return
    with contextlib.suppress(OSError):
        os.write(2, line)


@final
class PeerWatch:
    """Watches the processes of other ranks in a thread, and calls `ended` with the rank of each that has ended.

    peers: the processes by rank. Those on other machines, or in another namespace of process ids, are not watched.
    ended: function that is called in the thread of this object.
    """

    def __init__(self, peers: Mapping[int, RankProcess], *, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._rank_of: dict[int, int] = {}
        for rank, process in peers.items():
            descriptor = process.open()
            if descriptor is not None:
                self._rank_of[descriptor] = rank
        self._reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="hpctrain-peers", daemon=True)
        self._thread.start()

    @property
    def watched(self) -> tuple[int, ...]:
        """The ranks whose processes were found."""
        return tuple(self._rank_of.values())

    def close(self) -> None:
        """Stops watching. Does not wait for a call of `ended` that has begun."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def _watch(self) -> None:
        ready = select.poll()
        ready.register(self._reader, select.POLLIN)
        for descriptor in self._rank_of:
            ready.register(descriptor, select.POLLIN)
        while True:
            found = [descriptor for descriptor, _ in ready.poll()]
            if self._reader in found:
                break
            for descriptor in found:
                ready.unregister(descriptor)
                self._ended(self._rank_of[descriptor])
        for descriptor in (self._reader, *self._rank_of):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _ticks(pid: int) -> int:
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else -1


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
