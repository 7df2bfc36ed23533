"""The library, preloaded by ranks if there are more ranks than cores, that replaces `sched_yield` by a short sleep.

`hpctrain launch` preloads the library for the ranks. A rank of `hpctrain` that plain mpirun or srun has started
restarts its command line with the library (`restart_with_sleep`). The reasons are in docs/adr/0024-yield-by-sleep.md.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from hpctrain.errors import LaunchError
from hpctrain.launch.cores import RankCores, num_cpus_of_host
from hpctrain.launch.rank_identity.identity import find_launcher, identify
from hpctrain.launch.rank_identity.launcher_process import YIELD_STEM, find_launcher_process

YIELD_VARIABLE = "OMPI_MCA_mpi_yield_when_idle"
PRELOAD_VARIABLE = "LD_PRELOAD"
# Set in a restarted rank until it has started: prevents endless restarts if something removes LD_PRELOAD.
RESTARTED_VARIABLE = "HPCTRAIN_RESTARTED_FOR_YIELD"


def find_yield_library(directory: Path = Path(__file__).parent) -> str | None:
    """Returns the path of the shared library that replaces sched_yield by a short sleep, for LD_PRELOAD.

    Returns None if the library was not compiled, or if LD_PRELOAD cannot contain its path.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = str(directory / f"{YIELD_STEM}{suffix}")
        if os.path.exists(path) and not set(path) & set(": \t"):  # these separate libraries
            return path
    return None


def with_preload(environ: Mapping[str, str], library: str) -> str:
    """Returns the value of LD_PRELOAD in `environ` with `library` appended."""
    there = environ.get(PRELOAD_VARIABLE, "")
    if YIELD_STEM in there:
        return there
    return f"{there}:{library}" if there else library


def yields(environ: Mapping[str, str]) -> bool:
    """Returns False if the user has switched off that Open MPI yields the core while it waits, otherwise True."""
    return environ.get(YIELD_VARIABLE, "").strip().lower() not in ("0", "false", "no")


def in_effect(maps: str | None = None) -> bool:
    """Returns True if this process has loaded the library. maps: content of /proc/self/maps; None to read it."""
    return YIELD_STEM in (_own_maps() if maps is None else maps)


def lacks_yield_library(maps: str | None = None) -> bool:
    """Returns True if this process has loaded Open MPI without the library. Call it after MPI was loaded.

    maps: content of /proc/self/maps; None to read it.
    """
    found = _own_maps() if maps is None else maps
    return "libopen-pal" in found and YIELD_STEM not in found


def describe_oversubscription(cores: Sequence[RankCores], *, lacks_library: Sequence[bool]) -> str | None:
    """Returns advice if a host has more ranks than hardware threads and a rank there lacks the library; otherwise None.

    cores: cores of each rank.
    lacks_library: for each rank, the result of `lacks_yield_library`.
    """
    counts = Counter(found.host for found in cores)
    for host in dict.fromkeys(found.host for found, may in zip(cores, lacks_library, strict=True) if may):
        num_cpus = num_cpus_of_host(cores, host)
        if counts[host] > num_cpus:
            library = find_yield_library() or f"PATH/{YIELD_STEM}.so"
            return (
                f"{counts[host]} ranks share {num_cpus} cores of {host}: on Linux 6.18 and newer, ranks that wait "
                "inside Open MPI can keep the others from running for seconds; start the run with "
                f"`hpctrain launch`, or set {PRELOAD_VARIABLE}={library} for the ranks"
            )
    return None


def _own_maps() -> str:
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:
        return ""


def restart_environment(
    environ: Mapping[str, str], *, num_cpus: int | None, library: str | None
) -> dict[str, str] | None:
    """Returns the variables to set for a restart with the library; None if no restart is needed.

    library: path of the library; None if it was not compiled.
    num_cpus: number of hardware threads that all ranks of this host share; None if unknown.
    """
    row = find_launcher(environ)
    if row is None or not (row.may_be_open_mpi or row.is_hydra) or library is None or num_cpus is None:
        return None
    if RESTARTED_VARIABLE in environ or YIELD_STEM in environ.get(PRELOAD_VARIABLE, ""):
        return None
    try:
        num_ranks = identify(environ, socket.gethostname()).host_size
    except LaunchError:
        return None  # the command itself reports it
    if num_ranks is None or num_ranks <= num_cpus or (row.may_be_open_mpi and not yields(environ)):
        return None
    added = {PRELOAD_VARIABLE: with_preload(environ, library), RESTARTED_VARIABLE: "1"}
    if row.may_be_open_mpi:  # the others yield without being asked
        added[YIELD_VARIABLE] = environ.get(YIELD_VARIABLE) or "1"
    return added


def restart_with_sleep() -> None:
    """Restarts this process's command line with the library if there are more ranks than cores; otherwise returns.

    Call it before MPI starts. The new program keeps the process id, the launcher's variables and open files, so the
    launcher sees no difference. Under `hpctrain launch`, which has preloaded the library, this function returns at
    once.
    """
    environ = os.environ
    added = restart_environment(environ, num_cpus=_launcher_cpus(environ), library=find_yield_library())
    environ.pop(RESTARTED_VARIABLE, None)
    if added is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # on failure, continue without the library
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, **added})


def _launcher_cpus(environ: Mapping[str, str]) -> int | None:
    """Returns the number of hardware threads that the launcher may use on this host; None if unknown.

    The launcher's ranks share these threads. The affinity of a rank would not tell this number, because the launcher
    may have bound the rank to a part of the threads (--bind-to core). The same is true of a script between the launcher
    and the rank.
    """
    row, pid = find_launcher(environ), find_launcher_process(environ).pid
    if row is None or pid is None:
        return None
    try:
        num_cpus = len(os.sched_getaffinity(pid))
    except OSError:
        return None
    text = environ.get("SLURM_CPUS_ON_NODE", "") if row.name == "Slurm" else ""
    # The affinity of slurmstepd is not limited to the step's part of the node.
    return min(num_cpus, int(text)) if text.isdigit() else num_cpus
