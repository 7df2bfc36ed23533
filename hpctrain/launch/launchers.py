"""Table of the environment variables that each launcher sets in a rank.

The rows are tried in this order:

1. Open MPI, MVAPICH2, Hydra (MPICH and Intel MPI). They set their variables in every rank and nowhere else.
   They come before Slurm because inside an allocation Open MPI starts its own daemons with srun: a rank on
   the second node then also has the variables of that Slurm step, which has one task per node and is not the run.
2. A Slurm step (srun). Only step-scoped variables count. SLURM_NTASKS and SLURM_PROCID are also set in the
   shell of a batch script, where one plain `python` is one rank; SLURM_STEP_ID is set in a step only.
3. PMI, then PMIx, set by other launchers (Cray PALS, flux, prun).
4. None of them: one rank.

Mistakes in other projects that this order avoids: pytorch-lightning#19762, #20391, #20776; DeepSpeed#8444.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherVariables:
    """One row of the table: the names of a launcher's variables. Of several names the first one that is set counts.

    cure: advice for starting the ranks correctly.
    """

    name: str
    present: Callable[[Mapping[str, str]], bool]
    rank: str
    num_ranks: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    tasks_per_node: str | None = None
    host_name: str | None = None
    cure: str = "start the ranks again with the launcher of the MPI library in use"


def _all_set(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environ: all(environ.get(name) for name in names)


def _hydra(environ: Mapping[str, str]) -> bool:
    return _all_set("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")(environ)


def _intel(environ: Mapping[str, str]) -> bool:
    return _hydra(environ) and any(name.startswith("I_MPI_HYDRA") for name in environ)


LAUNCHERS: tuple[LauncherVariables, ...] = (
    LauncherVariables(
        name="Open MPI",
        present=_all_set("OMPI_COMM_WORLD_RANK"),
        rank="OMPI_COMM_WORLD_RANK",
        num_ranks=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK is not the node's number: it is the local rank over all jobs on the node.
        cure="start the ranks with the mpirun of the Open MPI that mpi4py and Horovod were built with",
    ),
    LauncherVariables(
        name="MVAPICH2",
        present=_all_set("MV2_COMM_WORLD_RANK"),
        rank="MV2_COMM_WORLD_RANK",
        num_ranks=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    LauncherVariables(
        name="Intel MPI",
        present=_intel,
        rank="PMI_RANK",
        num_ranks=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    LauncherVariables(
        name="MPICH",
        present=_hydra,
        rank="PMI_RANK",
        num_ranks=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    LauncherVariables(
        name="Slurm",
        present=_all_set("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
        rank="SLURM_PROCID",
        num_ranks=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
        host_name="SLURMD_NODENAME",
        cure="start the ranks with `srun --mpi=TYPE`, where `srun --mpi=list` shows the types and TYPE is "
        "one that this MPI library supports (pmix for Open MPI, pmi2 for MPICH), or with mpirun inside the job",
    ),
    LauncherVariables(
        name="PMI",
        present=_all_set("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        num_ranks=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_size=("PMI_LOCAL_SIZE",),
        node_rank=("PALS_NODEID",),
    ),
    LauncherVariables(
        # PMIx sets the rank in the environment, but reports the number of ranks only through a call.
        name="PMIx",
        present=_all_set("PMIX_RANK", "PMIX_NAMESPACE"),
        rank="PMIX_RANK",
        num_ranks=("PMIX_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE"),
    ),
)


def find_launcher(environ: Mapping[str, str]) -> LauncherVariables | None:
    """Returns the row of the launcher that started this process; None if there is none."""
    return next((row for row in LAUNCHERS if row.present(environ)), None)


def cure_for(launcher: str) -> str:
    """Advice on starting the ranks so that the launcher (a row's name) matches the MPI library."""
    row = next((row for row in LAUNCHERS if row.name == launcher), None)
    return (
        row.cure if row is not None else "start the ranks with the mpirun of this MPI library, or with srun"
    )
