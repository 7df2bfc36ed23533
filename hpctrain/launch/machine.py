"""Input for planning a launch: the cores of this machine and its installed launchers."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from enum import Enum

from hpctrain.launch.cores import core_share, cpu_share, read_cores
from hpctrain.launch.yielding import find_library

_QUERY_TIMEOUT_S = 20


class MpirunFamily(Enum):
    """Families of mpirun, by their options."""

    OPEN_MPI_4 = "Open MPI 4 or older"
    OPEN_MPI_5 = "Open MPI 5 or newer"
    HYDRA = "Hydra (MPICH, Intel MPI)"
    UNKNOWN = "an mpirun that hpctrain does not know"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mpirun:
    path: str
    family: MpirunFamily
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Srun:
    """`mpi_types`: names listed by `srun --mpi=list`, such as pmix and pmi2; none if it fails, see `failure`."""

    path: str
    mpi_types: tuple[str, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`num_cpus`: number of hardware threads that this process may use, which its ranks will share; `num_cores`: number
    of cores that these belong to. Neither exceeds the CPU limit of its control group.

    yield_library: the library that ranks preload if there are more than `num_cpus`; None if it was not compiled.
    """

    num_cores: int
    num_cpus: int
    yield_library: str | None
    is_root: bool
    mpirun: Mpirun | None
    srun: Srun | None


def survey_machine() -> Machine:
    """Inspects this machine. Runs `mpirun --version` and `srun --mpi=list` if they are installed."""
    mine = read_cores()
    mpirun_path = shutil.which("mpirun") or shutil.which("mpiexec")
    srun_path = shutil.which("srun")
    return Machine(
        num_cores=max(1, math.floor(core_share([mine], 0))),
        num_cpus=max(1, math.floor(cpu_share([mine], 0))),
        yield_library=find_library(),
        is_root=os.geteuid() == 0,
        mpirun=read_mpirun_version(_output([mpirun_path, "--version"])[1], path=mpirun_path)
        if mpirun_path
        else None,
        srun=read_srun(*_output([srun_path, "--mpi=list"]), path=srun_path) if srun_path else None,
    )


def host_name() -> str:
    """This machine's name, as ranks exchange it."""
    return socket.gethostname()


def read_mpirun_version(text: str, *, path: str) -> Mpirun:
    """Determines the family of an mpirun from `text`, the output of `mpirun --version`."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no version printed")
    family = MpirunFamily.UNKNOWN
    found = re.search(r"\(Open MPI\) (\d+)[.\d]*|\(OpenRTE\) (\d+)|PRRTE", text)
    if found is not None:
        major = next((int(group) for group in found.groups() if group), 5)
        family = MpirunFamily.OPEN_MPI_5 if major >= 5 else MpirunFamily.OPEN_MPI_4
    elif "HYDRA" in text or "Intel(R) MPI" in text:
        family = MpirunFamily.HYDRA
        version = re.search(r"Version:?\s+(\S.*)", text)
        first = f"Hydra {version[1].strip()}" if version else first
        # Intel's mpirun is a shell script that waits for this program: a signal would end the script alone.
        hydra = os.path.join(os.path.dirname(path), "mpiexec.hydra")
        path = hydra if os.access(hydra, os.X_OK) else path
    return Mpirun(path=path, family=family, version=first)


def read_srun(exit_code: int | None, text: str, *, path: str) -> Srun:
    """Reads `text`, the output of `srun --mpi=list`. exit_code: None if it did not end, or could not be run."""
    types = read_mpi_types(text) if exit_code == 0 else ()
    said = " ".join(text.split())[:200]
    end = "did not answer" if exit_code is None else f"failed with exit code {exit_code}"
    failure = "" if exit_code == 0 else f"srun --mpi=list {end}" + (f": {said}" if said else "")
    return Srun(path=path, mpi_types=types, failure=failure)


def read_mpi_types(text: str) -> tuple[str, ...]:
    """Returns the types in `text`, the output of `srun --mpi=list`. Its layout depends on Slurm's version: the types
    follow a line that ends with "types are...". Other lines, such as warnings before it, are not types."""
    _, heading, after = text.partition("types are...")
    listed = [line for line in after.splitlines() if "specific" not in line] if heading else []
    words = (word.strip(" ,:\t") for line in listed for word in line.removeprefix("srun: ").split())
    return tuple(dict.fromkeys(word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word)))


def _output(argv: list[str]) -> tuple[int | None, str]:
    """Exit code and output (both streams) of a short command; None and nothing if it cannot be run or takes over
    _QUERY_TIMEOUT_S seconds."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    return done.returncode, done.stdout
