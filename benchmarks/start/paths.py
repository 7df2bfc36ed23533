"""Operations on paths of the environment (packages, the standard library, hpctrain) during a start, seen by strace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from benchmarks.start.runs import Workplace, run_command
from benchmarks.starting import REPOSITORY, user_environment
from hpctrain.launch import ForkServer, plan_launch, resolve_command, survey_machine
from hpctrain.launch.fork_server.plan import KEY_VARIABLE, OFF

# Every system call that takes a path, and those that list a folder. -y shows the folder of a relative path.
_STRACE = [
    "strace",
    "-f",
    "-y",
    "-qq",
    "--seccomp-bpf",
    "-e",
    "signal=none",
    "-e",
    "trace=%file,getdents,getdents64",
]
_PATH = re.compile(
    r'^(?P<pid>\d+) +\w+\((?:(?:AT_FDCWD|\d+)<(?P<folder>[^>]*)>, )?"(?P<path>(?:[^"\\]|\\.)*)"'
)
_LIST = re.compile(r"^(?P<pid>\d+) +getdents(?:64)?\(\d+<(?P<path>[^>]*)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Numbers of path operations. count: of all processes. by_process: of each process that has any, descending."""

    count: int
    by_process: Sequence[int]


def why_not() -> str | None:
    """Returns why nothing can be counted here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run([*_STRACE, "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"strace does not work here: {tried.stderr.strip().splitlines()[-1:]}"
    return None


def measure(place: Workplace, *, num_ranks: int, forked: bool) -> Operations:
    """Counts the operations of a launch whose ranks train an epoch of digits: of ranks, clients, server and mpirun, but
    not of `hpctrain launch`, of which there is one for all nodes. Raises RanksFailed."""
    command, folder = place.training("run.epochs=1")
    environ = user_environment()
    plan = plan_launch(
        [resolve_command(command[0]), *command[1:]], num_ranks=num_ranks, environ=environ, machine=survey_machine(),
        fork_server=ForkServer() if forked else None,
    )  # fmt: skip
    trace = Path(f"{folder}.strace")
    argv = [*_STRACE, "-o", str(trace), *plan.argv]
    what = f"{num_ranks} ranks, {'with' if forked else 'without'} a fork server, under strace"
    run_command(argv, what=what, environ={KEY_VARIABLE: OFF, **environ, **plan.env_updates})
    with trace.open(errors="replace") as lines:
        found = count(lines, roots=environment_roots(), directory=REPOSITORY)
    trace.unlink()
    return found


def environment_roots() -> list[str]:
    """Returns the folders that hold the environment: of packages, of the standard library, of hpctrain."""
    names = [sys.prefix, *map(sysconfig.get_path, ("stdlib", "platstdlib")), str(REPOSITORY / "hpctrain")]
    names += [name for name in sys.path if name.endswith("-packages")]
    if sys.base_prefix != "/usr":  # the operating system's other files
        names.append(sys.base_prefix)
    return sorted({os.path.abspath(name) for name in names})


def count(lines: Iterable[str], *, roots: Sequence[str], directory: Path) -> Operations:
    """Counts the operations in a trace whose path is in one of `roots`. Pure. directory: where relative paths begin
    that the trace does not say."""
    found: dict[str, int] = {}
    for line in lines:
        seen = _PATH.match(line) or _LIST.match(line)
        if seen is None or not seen["path"]:  # an empty path is an open file itself
            continue
        folder = seen.groupdict().get("folder") or str(directory)
        path = PurePath(os.path.normpath(os.path.join(folder, seen["path"])))
        if any(path.is_relative_to(root) for root in roots):
            found[seen["pid"]] = found.get(seen["pid"], 0) + 1
    return Operations(count=sum(found.values()), by_process=sorted(found.values(), reverse=True))
