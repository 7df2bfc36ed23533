"""Starting the ranks of a benchmark as a user starts them, by `hpctrain launch`, and the record of how it was done."""

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
# Variables by which a rank can be made faster or slower.
_RECORDED = re.compile(
    r"LD_PRELOAD$|GLOO_|OMP_|MKL_|KMP_|HOROVOD_|HPCTRAIN_|MALLOC_|UCX_|TORCH_|SLURM_PMIX_FENCE$|SLURM_OVERCOMMIT$"
    r"|OMPI_MCA_(mpi|btl|pml|coll|mtl|osc|opal|rmaps|hwloc)_"
)
_SAID_BY_LAUNCH = "hpctrain launch: "
_ENDS_IN_S = 10.0


def user_environment() -> dict[str, str]:
    """The environment of this process without the variables of a launcher around it. Nothing is added."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OUTER_LAUNCHER)}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended, with everything that it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_to_end(argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float) -> Ended:
    """Run a command from the repository's folder. After `timeout_s` it is ended: subprocess.TimeoutExpired.

    It is ended by SIGTERM, upon which launchers end their ranks, and 10 s later by SIGKILL.
    """
    # Files and no pipes: a process that outlives its launcher would keep a pipe open.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            list(argv), cwd=REPOSITORY, env=dict(environ), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
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
    """How the ranks of a measurement were started, in words that name no folder of this machine.

    command: what a user types, with the variables that the benchmark set. launched: the line that `hpctrain launch`
    made of it. notes: what else it said.
    ranks: as the ranks found themselves, see `this_rank`; those that are alike together, `ranks` are their numbers.
    """

    command: str
    launched: str
    notes: Sequence[str]
    ranks: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def start_of(
    argv: Sequence[str],
    ended: Ended,
    *,
    variables: Mapping[str, str],
    ranks: Sequence[Mapping[str, Any]],
    directory: Path,
) -> Start:
    """The record of a launch that has ended.

    variables: that the benchmark set for it. directory: of the measurement, called DIRECTORY in the record.
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
    """A command line as a user writes it, without this machine's folders."""
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
    """What this process was given: `cores` it may run on, torch's `threads`, `variables` that make it faster or
    slower, `preload` (LD_PRELOAD, file names only; empty: none)."""
    import torch

    variables = {name: value for name, value in sorted(os.environ.items()) if _RECORDED.match(name)}
    preload = variables.pop("LD_PRELOAD", "").replace(":", " ").split()
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "variables": variables,
        "preload": [Path(name).name for name in preload],
    }
