"""Table of the environment variables that each launcher sets in a rank.

The rows are tried in this order:

1. jsrun (LSF), which sets Open MPI's variables as well.
2. Open MPI, MVAPICH2, Hydra (MPICH and Intel MPI). They set their variables in every rank and nowhere else.
   They come before the resource managers, in whose jobs they run: inside a Slurm allocation Open MPI starts its own
   daemons with srun, so a rank on the second node also has the variables of that Slurm step, which has one task per
   node and is not the run. The exception is srun called by a rank of Open MPI: then PMIX_NAMESPACE is Slurm's.
3. Flux. A Flux instance may itself run as a Slurm step, whose variables its ranks inherit.
4. A Slurm step (srun). Only step-scoped variables count. SLURM_NTASKS and SLURM_PROCID are also set in the
   shell of a batch script, where one plain `python` is one rank; SLURM_STEP_ID is set in a step only.
5. Cray PALS and ALPS, then PMI in its variants and PMIx, set by other launchers (mpirun_rsh of MVAPICH 3, mpiexec of
   ParaStation MPI, prun of PRRTE).
6. None of them: one rank. PBS, LSF and Kubernetes set variables of the job only, and start no ranks themselves.

Sources of the names are in tests/fixtures/launchers, one file a launcher: recorded, or composed from documentation.

Mistakes in other projects that this order avoids: pytorch-lightning#19762, #20391, #20776; DeepSpeed#8444.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# For launchers that set a rank's number, but tell the number of ranks only to the MPI library.
NUM_RANKS_VARIABLE = "HPCTRAIN_NUM_RANKS"
# From here on a step's number is a special one: the batch script, `salloc`'s interactive shell, the external step.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherVariables:
    """One row of the table: the names of a launcher's variables. Of several names the first one that is set counts.

    may_be_open_mpi: its ranks may use Open MPI, or a library made from it. is_hydra: they use MPICH or Intel MPI.
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
    may_be_open_mpi: bool = False
    is_hydra: bool = False
    cure: str = "start the ranks again with the launcher of the MPI library in use"


def _all_set(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environ: all(environ.get(name) for name in names)


def _jsrun(environ: Mapping[str, str]) -> bool:
    # jsrun sets Open MPI's variables too. Other values there are those of an mpirun that was called inside a rank.
    pairs = (("JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK"), ("JSM_NAMESPACE_SIZE", "OMPI_COMM_WORLD_SIZE"))
    return all(
        environ.get(ours) and environ.get(other, environ[ours]) == environ[ours] for ours, other in pairs
    )


def _open_mpi(environ: Mapping[str, str]) -> bool:
    # A rank of mpirun has mpirun's namespace. With Slurm's, srun was called inside a rank, and is the inner launcher.
    by_srun = environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix.")
    # `flux run -o mpi=spectrum` sets the rank alone (flux-core#3173).
    by_flux = "FLUX_TASK_RANK" in environ and "OMPI_COMM_WORLD_SIZE" not in environ
    return _all_set("OMPI_COMM_WORLD_RANK")(environ) and not by_srun and not by_flux


def _hydra(environ: Mapping[str, str]) -> bool:
    return _all_set("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")(environ)


def _intel(environ: Mapping[str, str]) -> bool:
    return _hydra(environ) and any(name.startswith("I_MPI_HYDRA") for name in environ)


def _slurm_step(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    special = step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP
    return _all_set("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")(environ) and not special


LAUNCHERS: tuple[LauncherVariables, ...] = (
    LauncherVariables(
        name="jsrun",
        present=_jsrun,
        rank="JSM_NAMESPACE_RANK",
        num_ranks=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        may_be_open_mpi=True,
        cure="jsrun starts ranks of IBM Spectrum MPI: build mpi4py and Horovod with it, or use mpirun of the MPI "
        "library in use inside the job",
    ),
    LauncherVariables(
        name="Open MPI",
        present=_open_mpi,
        rank="OMPI_COMM_WORLD_RANK",
        num_ranks=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK is not the node's number: it is the local rank over all jobs on the node.
        may_be_open_mpi=True,
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
        is_hydra=True,
    ),
    LauncherVariables(
        name="MPICH",
        present=_hydra,
        rank="PMI_RANK",
        num_ranks=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        is_hydra=True,
    ),
    LauncherVariables(
        name="Flux",
        present=_all_set("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        rank="FLUX_TASK_RANK",
        num_ranks=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        may_be_open_mpi=True,
        cure="start the ranks with `flux run`, where `-o pmi=` names what this MPI library supports (simple for "
        "MPICH, pmix with flux-pmix for Open MPI 5, cray-pals for Cray MPICH), or with mpirun inside the job",
    ),
    LauncherVariables(
        name="Slurm",
        present=_slurm_step,
        rank="SLURM_PROCID",
        num_ranks=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
        host_name="SLURMD_NODENAME",
        may_be_open_mpi=True,
        cure="start the ranks with `srun --mpi=TYPE`, where `srun --mpi=list` shows the types and TYPE is "
        "one that this MPI library supports (pmix for Open MPI, pmi2 for MPICH), or with mpirun inside the job",
    ),
    LauncherVariables(
        name="Cray PALS",
        present=_all_set("PALS_RANKID"),
        rank="PALS_RANKID",
        num_ranks=("PMI_SIZE", NUM_RANKS_VARIABLE),
        local_rank=("PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_size=("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        cure=f"start the ranks with mpiexec of PALS and a library of Cray MPICH or MPICH; where PALS does not set "
        f"PMI_SIZE, pass the number of ranks: mpiexec -n N --env {NUM_RANKS_VARIABLE}=N",
    ),
    LauncherVariables(
        name="Cray ALPS",
        present=_all_set("ALPS_APP_PE"),
        rank="ALPS_APP_PE",
        num_ranks=(NUM_RANKS_VARIABLE,),
        cure=f"pass the number of ranks: aprun -n N -e {NUM_RANKS_VARIABLE}=N, with a library of Cray MPICH",
    ),
    LauncherVariables(
        # Hydra with -pmi-port, and mpirun_rsh of MVAPICH 3: the rank asks at the port for the number of ranks.
        name="PMI port",
        present=_all_set("PMI_ID", "PMI_PORT"),
        rank="PMI_ID",
        num_ranks=(NUM_RANKS_VARIABLE,),
        local_rank=("MPI_LOCALRANKID", "MVP_COMM_WORLD_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS",),
        cure=f"start the ranks with mpiexec without -pmi-port, or pass the number of ranks: mpiexec -genv "
        f"{NUM_RANKS_VARIABLE} N -n N, mpirun_rsh -np N {NUM_RANKS_VARIABLE}=N",
    ),
    LauncherVariables(
        name="PMI",
        present=_all_set("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        num_ranks=("PMI_SIZE",),
        local_rank=("PMI_LOCAL_RANK",),
        local_size=("PMI_LOCAL_SIZE",),
        may_be_open_mpi=True,
    ),
    LauncherVariables(
        # PMIx sets the rank in the environment, but reports the number of ranks only through a call.
        name="PMIx",
        present=_all_set("PMIX_RANK", "PMIX_NAMESPACE"),
        rank="PMIX_RANK",
        num_ranks=("PMI_SIZE", NUM_RANKS_VARIABLE),
        may_be_open_mpi=True,
        cure=f"pass the number of ranks: prun -n N -x {NUM_RANKS_VARIABLE}=N, or use mpirun",
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
