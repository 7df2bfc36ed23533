"""Finds the launcher's process on this machine, and the processes between the launcher and this process.

The processes in between may be wrapper scripts, or the rank itself if the rank has started this process. The launcher
is the nearest ancestor that is one of the known programs, or that lacks the rank's variables.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch.rank_identity.identity import find_launcher

# Programs whose children are the ranks of a node.
STARTERS = {
    "slurmstepd",
    "orted",
    "orterun",
    "prted",
    "prterun",
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "hydra_pmi_proxy",
    "flux-shell",
}
# Parts of names of files that a process maps in MPI_Init: a library of Open MPI 4, PMIx's shared memory with Open MPI 5
# and 6, whose libraries are part of libmpi.
_MAPPED_BY_INIT = ("/mca_pml_", "/pmix-gds-shmem")
# File name of the client, which the launcher starts in place of a forked rank, without the suffix that Python adds.
CLIENT_STEM = "_fork_client"
# The name of the library in which `sched_yield` sleeps, without its suffix.
YIELD_STEM = "_yield_by_sleep"
# Set in a rank that a fork server has forked: the process id of its client, which the launcher started in its place.
CLIENT_VARIABLE = "HPCTRAIN_FORKED_FOR"
# Set in a rank by `hpctrain.init`, for the processes that it starts: the process id of the rank.
RANK_PID_VARIABLE = "HPCTRAIN_RANK_PID"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherProcess:
    """The launcher's process on this machine.

    pid: process id of the launcher; None if the launcher is not visible, as from a container that has its own process
    ids.
    between: ancestors of this process that have the rank's variables, nearest first.
    """

    pid: int | None
    between: tuple[int, ...] = ()

    def key(self) -> str | None:
        """Returns a text that identifies this launcher's process on this machine until the next boot.

        Returns None if the launcher's process is unknown.
        """
        return None if self.pid is None else process_key(self.pid)


def process_key(pid: int) -> str | None:
    """Returns a text that identifies a process on this machine until the next boot; None if the process has ended."""
    try:
        return f"{pid}-{_stat(pid)[19]}"
    except (OSError, IndexError):
        return None


def was_forked(environ: Mapping[str, str]) -> bool:
    """Returns True if this process is, or descends from, a rank that a fork server has forked.

    environ: environment variables of this process.
    """
    return CLIENT_VARIABLE in environ


def is_client(pid: int) -> bool:
    """Returns True if process `pid` is a client of a fork server, which the launcher starts in place of a rank."""
    try:
        return os.readlink(f"/proc/{pid}/exe").rpartition("/")[2].startswith(CLIENT_STEM)
    except OSError:
        return False


def forked_for(client: int) -> int | None:
    """Returns the process id of the rank that was forked for a client; None before the fork, or if the rank has ended.

    The client holds a pidfd of the rank's process, and the kernel reports the process id of a pidfd.
    """
    folder = Path(f"/proc/{client}")
    try:
        for name in os.listdir(folder / "fd"):
            if "[pidfd]" in os.readlink(folder / "fd" / name):
                found = re.search(r"^Pid:\s+(\d+)$", (folder / "fdinfo" / name).read_text(), re.MULTILINE)
                return int(found[1]) if found is not None and int(found[1]) > 0 else None
    except OSError:
        return None
    return None


def seconds_since_start(environ: Mapping[str, str], *, proc: Path = Path("/proc")) -> float | None:
    """Returns how long ago this rank's program was started, in seconds; None if unknown.

    For a forked rank, the start of its client counts.

    environ: environment variables of this process, which is the rank.
    """
    try:
        fields = (proc / environ.get(CLIENT_VARIABLE, "self") / "stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def find_launcher_process(environ: Mapping[str, str]) -> LauncherProcess:
    """Finds the process of the launcher that started this rank. environ: environment variables of this process."""
    row = find_launcher(environ)
    between: list[int] = []
    if row is None:
        return LauncherProcess(pid=None)
    try:
        pid = _above("self")
        while pid > 0 and _name(pid) not in STARTERS and variable_of(pid, row.rank) is not None:
            between.append(pid)
            pid = _above(pid)
    except (OSError, ValueError, IndexError):
        pid = 0
    return LauncherProcess(pid=pid or None, between=tuple(between))


def describe_outer_rank(environ: Mapping[str, str]) -> str | None:
    """Returns a description of the ancestor of this process that is already the rank; None if there is none.

    MPI accepts only one process per rank. An ancestor counts as the rank if it has called `hpctrain.init` or started
    MPI. A wrapper script between the launcher and the rank has done neither.

    environ: environment variables of this process.
    """
    marked = environ.get(RANK_PID_VARIABLE, "")
    for pid in find_launcher_process(environ).between:
        if str(pid) == marked:
            return f"process {pid} ({command_of(pid)}), which has called hpctrain.init()"
        maps = _read(pid, "maps")
        if any(name in maps for name in _MAPPED_BY_INIT):
            return f"process {pid} ({command_of(pid)}), which has started MPI"
    return None


def processes_of_ranks(launcher: int, *, variable: str) -> dict[int, int]:
    """Returns the process ids of the running ranks that `launcher` has started on this machine, by rank.

    If a rank has several processes, the process nearest to the launcher is returned.

    variable: name of the launcher's variable that holds the rank.
    """
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = _stat(entry.name)
                if fields[0] not in "ZX":
                    parents[int(entry.name)] = int(fields[1])
            except (OSError, ValueError, IndexError):
                continue  # it has ended
    found: dict[int, int] = {}
    for pid in _descendants(launcher, parents):
        text = variable_of(pid, variable) or ""
        if text.isdigit():
            found.setdefault(int(text), pid)
    return found


def _descendants(root: int, parents: Mapping[int, int]) -> Iterator[int]:
    """Yields the descendants of a process, nearest first."""
    level = [root]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        yield from level


def variable_of(pid: int | str, name: str) -> str | None:
    """Returns the value of an environment variable at the start of a process.

    Returns None if the variable is not set or may not be read.
    """
    start = name.encode() + b"="
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:
        return None  # a process of another user, such as slurmstepd
    return next(
        (item[len(start) :].decode(errors="replace") for item in items if item.startswith(start)), None
    )


def command_of(pid: int) -> str:
    """Returns the first 120 characters of a process's command line; empty if the process has ended."""
    return _read(pid, "cmdline").replace("\0", " ").strip()[:120]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _name(pid: int) -> str:
    return _read(pid, "comm").strip()


def _above(pid: int | str) -> int:
    """Returns the parent of a process; for a forked rank, the parent of its client."""
    client = variable_of(pid, CLIENT_VARIABLE) or ""
    marked = variable_of(_parent(pid), CLIENT_VARIABLE)
    return _parent(int(client)) if client.isdigit() and marked != client else _parent(pid)


def _parent(pid: int | str) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int | str) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name: state, parent, and so on; the start time is number 19."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
