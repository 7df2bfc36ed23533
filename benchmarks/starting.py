"""Starts the ranks of a benchmark with `hpctrain launch`, as a user does, and records how they were started."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, "-m", "hpctrain.cli.main", "launch"]  # what the command `hpctrain launch` runs
# A launcher around this process sets these: the ranks would take themselves for its ranks.
_OUTER_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "PRTE_", "ORTE_", "HPCTRAIN_", "HOROVOD_")
# Variables by which a rank can be made faster or slower. RANK_PID and FORKED_FOR are numbers of processes.
_RECORDED = re.compile(
    r"LD_PRELOAD$|GLOO_|OMP_|MKL_|KMP_|HOROVOD_|HPCTRAIN_(?!RANK_PID$|FORKED_FOR$)|MALLOC_|UCX_|TORCH_"
    r"|SLURM_PMIX_FENCE$|SLURM_OVERCOMMIT$|OMPI_MCA_(mpi|btl|pml|coll|mtl|osc|opal|rmaps|hwloc)_"
)
_SAID_BY_LAUNCH = "hpctrain launch: "
_ENDS_IN_S = 10.0


def user_environment() -> dict[str, str]:
    """Returns this process's environment without the variables that an outer launcher has set."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OUTER_LAUNCHER)}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Exit code and output of a command that has ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def tail(self) -> str:
        """The last lines of the output."""
        return "\n".join((self.stdout + self.stderr).splitlines()[-30:])


def run_to_end(
    argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float, cwd: Path = REPOSITORY
) -> Ended:
    """Runs a command and waits for its end.

    After `timeout_s` the command gets SIGTERM, on which launchers end their ranks, and SIGKILL 10 s later; then raises
    subprocess.TimeoutExpired.
    """
    # Files and no pipes: a process that outlives its launcher would keep a pipe open.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            list(argv), cwd=cwd, env=dict(environ), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
        except BaseException:
            _end(process)
            raise
        for file in (stdout, stderr):
            file.seek(0)
        return Ended(
            returncode=process.returncode,
            stdout=stdout.read().decode(errors="replace"),
            stderr=stderr.read().decode(errors="replace"),
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_ENDS_IN_S)
            return
        except ProcessLookupError:
            process.wait()
            return
        except subprocess.TimeoutExpired:
            continue


@dataclass(frozen=True, kw_only=True)
class Start:
    """How the ranks of a measurement were started. The texts contain no path of this machine.

    command: the command line as a user types it, with the variables that the benchmark set. launched: the command line
    that `hpctrain launch` ran. notes: other lines that it printed.
    ranks: one entry per group of ranks with equal `this_rank`; its `ranks` are the ranks' numbers.
    """

    command: str
    launched: str
    notes: Sequence[str]
    ranks: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def start_of(
    argv: Sequence[str], ended: Ended, *, variables: Mapping[str, str], ranks: Sequence[Mapping[str, Any]],
    directory: Path,
) -> Start:  # fmt: skip
    """Returns the record of a launch that has ended.

    variables: environment variables that the benchmark set. directory: of the measurement; the record says DIRECTORY.
    """
    said = [
        line.removeprefix(_SAID_BY_LAUNCH) for line in ended.stderr.splitlines() if _SAID_BY_LAUNCH in line
    ]
    launched = next((line for line in said if "benchmarks." in line), "")
    set_before = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return Start(
        command=without_places(" ".join([*set_before, shlex.join(argv)]), directory=directory),
        launched=without_places(launched, directory=directory),
        notes=[line for line in said if line != launched],
        ranks=_alike(ranks),
    )


def _alike(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for number, facts in enumerate(ranks):
        group = next((group for group in groups if {**group, "ranks": 0} == {**facts, "ranks": 0}), None)
        if group is None:
            groups.append({"ranks": [number], **facts})
        else:
            group["ranks"].append(number)
    return groups


def without_places(text: str, *, directory: Path) -> str:
    """Returns a command line without this machine's paths."""
    for long, short in (
        (shlex.join(LAUNCH), "hpctrain launch"),
        (str(directory), "DIRECTORY"),
        (sys.executable, "python"),
        (str(Path(sys.prefix).resolve()), "VENV"),
        (sys.prefix, "VENV"),
        (str(REPOSITORY), "."),
    ):
        text = text.replace(long, short)
    return text


def this_rank() -> dict[str, Any]:
    """Returns the settings of this process that affect its speed: `cores` it may run on, torch's `threads`, environment
    `variables`, and `preload` (file names in LD_PRELOAD)."""
    import torch

    variables = {name: value for name, value in sorted(os.environ.items()) if _RECORDED.match(name)}
    preload = variables.pop("LD_PRELOAD", "").replace(":", " ").split()
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "variables": variables,
        "preload": [Path(name).name for name in preload],
    }
