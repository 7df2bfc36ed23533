"""The placement of ranks on nodes, the environment of ranks that share cores, and the survey of this machine."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hpctrain.errors import LaunchError
from hpctrain.launch.cores import core_share, cpu_share, read_cores
from hpctrain.launch.yielding import (
    PRELOAD_VARIABLE,
    YIELD_VARIABLE,
    find_yield_library,
    with_preload,
    yields,
)

_OTHER_ALLOCATIONS = ("PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Number of ranks and nodes of a launch.

    num_nodes: number of nodes; None if only mpirun knows the nodes of the scheduler.
    emulated: True if one machine emulates several nodes.
    """

    num_ranks: int
    ranks_per_node: int | None
    num_nodes: int | None
    emulated: bool

    @property
    def on_one_machine(self) -> bool:
        return self.num_nodes == 1

    @property
    def ranks_on_a_node(self) -> int:
        if self.on_one_machine or (self.num_nodes is None and self.ranks_per_node is None):
            return self.num_ranks
        if self.ranks_per_node is not None:
            return min(self.ranks_per_node, self.num_ranks)
        return -(-self.num_ranks // (self.num_nodes or 1))


def place_ranks(
    num_ranks: int,
    ranks_per_node: int | None,
    *,
    environ: Mapping[str, str],
    hosts: Sequence[str],
    notes: list[str],
) -> Placement:
    """Places ranks on the nodes of `hosts` or of the scheduler's allocation.

    On one machine, nodes are emulated if `ranks_per_node` is less than `num_ranks`. Adds messages for the user to
    `notes`. Raises LaunchError if there are too few nodes.
    """
    num_nodes: int | None = 1
    where = "this machine is"
    if hosts:
        num_nodes, where = len(set(hosts)), f"{len(set(hosts))} hosts are"
    elif environ.get("SLURM_JOB_ID"):
        text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
        if not text.isdigit() or int(text) < 1:
            raise LaunchError(
                f"SLURM_JOB_NUM_NODES={text!r} is not a number of nodes: unset it, or get a new allocation"
            )
        num_nodes = int(text)
        where = f"the Slurm allocation {environ['SLURM_JOB_ID']} has {num_nodes}, which is"
    elif any(environ.get(name) for name in _OTHER_ALLOCATIONS):
        num_nodes = None
    emulated = num_nodes == 1 and ranks_per_node is not None and ranks_per_node < num_ranks
    if emulated:
        nodes = -(-num_ranks // (ranks_per_node or 1))
        notes.append(
            f"one machine emulates {nodes} nodes of {ranks_per_node} ranks: no traffic crosses a network"
        )
    elif num_nodes is not None and ranks_per_node is not None and num_nodes > 1:
        needed = -(-num_ranks // ranks_per_node)
        if needed > num_nodes:
            raise LaunchError(
                f"{num_ranks} ranks with {ranks_per_node} on a node need {needed} nodes, but {where} "
                f"too few: ask for {needed} nodes, use --ranks-per-node {-(-num_ranks // num_nodes)}, or "
                f"-n {ranks_per_node * num_nodes}"
            )
        num_nodes = needed
    elif num_nodes is not None and num_nodes > num_ranks:
        notes.append(
            f"{num_nodes} nodes are available, but {num_ranks} ranks use at most {num_ranks} of them"
        )
        num_nodes = num_ranks
    return Placement(
        num_ranks=num_ranks, ranks_per_node=ranks_per_node, num_nodes=num_nodes, emulated=emulated
    )


def set_omp_threads(
    placement: Placement, *, num_cores: int, environ: Mapping[str, str], updates: dict[str, str]
) -> None:
    """Sets OMP_NUM_THREADS to a rank's share of the cores, unless the user has set it."""
    if not environ.get("OMP_NUM_THREADS"):
        # Without it every rank starts one thread per core, which is ranks x cores threads on the machine.
        updates["OMP_NUM_THREADS"] = str(max(1, num_cores // placement.ranks_on_a_node))


def give_way_while_waiting(
    environ: Mapping[str, str], *, updates: dict[str, str], library: str | None, notes: list[str]
) -> None:
    """Sets the environment so that ranks sleep while they wait, for launches with more ranks than cores.

    Open MPI polls while it waits, on a core that the awaited rank may need. On some kernels this keeps that rank from
    running even if Open MPI yields (sched_yield).

    library: path of the library that turns yields into short sleeps; None if it was not compiled.
    """
    if not environ.get(YIELD_VARIABLE):
        updates[YIELD_VARIABLE] = "1"
    if yields(environ):
        preload_sleep(environ, updates=updates, library=library, notes=notes)


def preload_sleep(
    environ: Mapping[str, str], *, updates: dict[str, str], library: str | None, notes: list[str]
) -> None:
    """Makes the ranks preload the library that turns yields into short sleeps. MPICH yields by default."""
    if library is not None:
        updates[PRELOAD_VARIABLE] = with_preload(environ, library)
    else:
        notes.append(
            "the library that lets waiting ranks sleep was not compiled: on Linux 6.18 and newer, ranks may wait for "
            "seconds; install a C compiler, then install hpctrain again (make setup)"
        )


_QUERY_TIMEOUT_S = 20


class MpirunFamily(Enum):
    """Families of mpirun, which differ in their options."""

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
    """An installed srun.

    mpi_types: types that `srun --mpi=list` prints, such as pmix and pmi2; empty if that command fails.
    failure: why `srun --mpi=list` fails; "" if the command succeeds.
    """

    path: str
    mpi_types: tuple[str, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMachine:
    """The cores of this machine, and the launchers that are installed on it.

    num_cores: number of cores that this process may use. The ranks that this process starts share these cores.
    num_cpus: number of hardware threads of these cores. Neither number exceeds the CPU limit of the control group.
    yield_library: path of the library that ranks preload if there are more ranks than `num_cpus`; None if it was not
    compiled.
    is_root: True if this process runs as root.
    mpirun, srun: the installed launchers; None for a launcher that is not installed.
    """

    num_cores: int
    num_cpus: int
    yield_library: str | None
    is_root: bool
    mpirun: Mpirun | None
    srun: Srun | None


def survey_machine() -> LocalMachine:
    """Inspects this machine. Runs `mpirun --version` and `srun --mpi=list`, if they are installed."""
    mine = read_cores()
    mpirun_path = shutil.which("mpirun") or shutil.which("mpiexec")
    srun_path = shutil.which("srun")
    return LocalMachine(
        num_cores=max(1, math.floor(core_share([mine], 0))),
        num_cpus=max(1, math.floor(cpu_share([mine], 0))),
        yield_library=find_yield_library(),
        is_root=os.geteuid() == 0,
        mpirun=read_mpirun_version(_output([mpirun_path, "--version"])[1], path=mpirun_path)
        if mpirun_path
        else None,
        srun=read_srun(*_output([srun_path, "--mpi=list"]), path=srun_path) if srun_path else None,
    )


def host_name() -> str:
    """Returns this machine's name, as ranks exchange it."""
    return socket.gethostname()


def read_mpirun_version(text: str, *, path: str) -> Mpirun:
    """Determines the family of an mpirun. text: output of `mpirun --version`."""
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
    """Reads the output of `srun --mpi=list`.

    exit_code: exit code of that command; None if the command did not end, or could not be run.
    """
    types = read_mpi_types(text) if exit_code == 0 else ()
    said = " ".join(text.split())[:200]
    end = "did not answer" if exit_code is None else f"failed with exit code {exit_code}"
    failure = "" if exit_code == 0 else f"srun --mpi=list {end}" + (f": {said}" if said else "")
    return Srun(path=path, mpi_types=types, failure=failure)


def read_mpi_types(text: str) -> tuple[str, ...]:
    """Returns the types in the output of `srun --mpi=list`.

    The layout depends on Slurm's version. The types follow a line that ends with "types are...". Other lines, such as
    warnings before that line, contain no types.
    """
    _, heading, after = text.partition("types are...")
    listed = [line for line in after.splitlines() if "specific" not in line] if heading else []
    words = (word.strip(" ,:\t") for line in listed for word in line.removeprefix("srun: ").split())
    return tuple(dict.fromkeys(word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word)))


def _output(argv: list[str]) -> tuple[int | None, str]:
    """Returns exit code and output (both streams) of a short command.

    Returns (None, "") if the command cannot be run, or takes longer than _QUERY_TIMEOUT_S seconds.
    """
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
