"""The rank of this process, read from the environment variables that its launcher sets.

`LAUNCHERS` is the table of these variables, tried from the first row to the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.errors import LaunchError, TopologyError

# Table of the environment variables that each launcher sets in a rank.
#
# The rows are tried in this order:
#
# 1. jsrun (LSF), which sets Open MPI's variables as well.
# 2. Open MPI, MVAPICH2, Hydra (MPICH and Intel MPI). They set their variables in every rank and nowhere else.
#    They come before the resource managers, in whose jobs they run: inside a Slurm allocation Open MPI starts its own
#    daemons with srun, so a rank on the second node also has the variables of that Slurm step, which has one task per
#    node and is not the run. The exception is srun called by a rank of Open MPI: then PMIX_NAMESPACE is Slurm's.
# 3. Flux. A Flux instance may itself run as a Slurm step, whose variables its ranks inherit.
# 4. A Slurm step (srun). Only step-scoped variables count. SLURM_NTASKS and SLURM_PROCID are also set in the
#    shell of a batch script, where one plain `python` is one rank; SLURM_STEP_ID is set in a step only.
# 5. Cray PALS and ALPS, then PMI in its variants and PMIx, set by other launchers (mpirun_rsh of MVAPICH 3, mpiexec of
#    ParaStation MPI, prun of PRRTE).
# 6. None of them: one rank. PBS, LSF and Kubernetes set variables of the job only, and start no ranks themselves.
#
# Sources of the names are in tests/fixtures/launchers, one file per launcher: recorded, or composed from
# documentation.
#
# Mistakes in other projects that this order avoids: pytorch-lightning#19762, #20391, #20776;
# DeepSpeed#8444.


# For launchers that set a rank's number, but tell the number of ranks only to the MPI library.
NUM_RANKS_VARIABLE = "HPCTRAIN_NUM_RANKS"
# Steps with this number or a higher one are special: the batch script, `salloc`'s interactive shell, the external step.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherVariables:
    """One row of the table: the names of a launcher's variables. Of several names, the first that is set counts.

    name: name of the launcher, for messages.
    present: function that returns True if the environment variables that it is given were set by this launcher.
    rank, num_ranks: variables of the rank and of the number of ranks.
    local_rank, local_size: variables of the local rank on the node, and of the number of ranks on the node.
    node_rank: variables of the index of the node.
    tasks_per_node: variable with the number of ranks on each node, in Slurm's short form.
    host_name: variable with the name of the node.
    may_be_open_mpi: True if ranks of this launcher may use Open MPI, or a library derived from Open MPI.
    is_hydra: True if ranks of this launcher use MPICH or Intel MPI.
    cure: advice for the user on how to start the ranks correctly.
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
        cure="jsrun starts only ranks that use IBM Spectrum MPI: build mpi4py and Horovod with it, or use mpirun of "
        "the MPI library in use inside the job",
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
    """Returns the table row of the launcher that started this process; None if no launcher did."""
    return next((row for row in LAUNCHERS if row.present(environ)), None)


def cure_for(launcher: str) -> str:
    """Returns advice on starting the ranks so that the launcher, given by name, matches the MPI library."""
    row = next((row for row in LAUNCHERS if row.name == launcher), None)
    return (
        row.cure if row is not None else "start the ranks with the mpirun of this MPI library, or with srun"
    )


_PART = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_counts(text: str, *, variable: str) -> list[int]:
    """Returns one count per node from Slurm's short form: `2(x3),1` is [2, 2, 2, 1].

    variable: name of the environment variable, for the error message.

    Raises LaunchError if the text does not have this form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise LaunchError(
                f"{variable}={text!r} is not a list of counts such as '2(x3),1': "
                "the variable is not one that Slurm set; unset it, or start the ranks again with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# Rank of this process, read from the environment variables that its launcher set.


RANKS_PER_NODE_VARIABLE = "HPCTRAIN_RANKS_PER_NODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """Rank of this process in the run and on its node. A value is None if the launcher does not set it.

    If `emulated`, then `local_rank`, `local_size`, `node_rank` and `node_name` refer to the emulated node, while
    `host_rank` and `host_size` always count the ranks on this machine.
    """

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None
    node_name: str
    emulated: bool = False
    ranks_per_node: int | None = None
    host_rank: int | None = None
    host_size: int | None = None

    def describe(self) -> str:
        """Returns a text such as `rank 2 of 4 (Open MPI), local rank 0 of 2 on host/1 (emulated node)`."""
        text = f"rank {self.rank} of {self.num_ranks} ({self.launcher})"
        if self.local_rank is not None:
            text += f", local rank {self.local_rank}"
            text += f" of {self.local_size}" if self.local_size is not None else ""
        return f"{text} on {self.node_name}" + (" (emulated node)" if self.emulated else "")


def identify(environ: Mapping[str, str], hostname: str) -> RankIdentity:
    """Returns the identity of this process. Without a launcher's variables, this process is the only rank.

    hostname: name of the node if the launcher sets none.

    Raises LaunchError if the variables contradict each other (left over from another launch), if there is a rank but
    no number of ranks, or if torchrun started this process.
    """
    row = find_launcher(environ)
    if row is None:
        _refuse_torchrun(environ)
        identity = RankIdentity(
            launcher="none",
            rank=0,
            num_ranks=1,
            local_rank=0,
            local_size=1,
            node_rank=0,
            node_name=hostname,
            host_rank=0,
            host_size=1,
        )
    else:
        identity = _from_row(row, environ, hostname)
    text = environ.get(RANKS_PER_NODE_VARIABLE)
    return _emulate(identity, text, hostname) if text else identity


def _from_row(row: LauncherVariables, environ: Mapping[str, str], hostname: str) -> RankIdentity:
    rank = _number(environ, (row.rank,), row)
    num_ranks = _number(environ, row.num_ranks, row)
    if rank is not None and num_ranks is None and NUM_RANKS_VARIABLE in row.num_ranks:
        raise LaunchError(
            f"{row.name} started this process as rank {rank}, but tells the number of ranks to MPI only, and "
            f"{NUM_RANKS_VARIABLE} is not set: {row.cure}"
        )
    if rank is None or num_ranks is None:
        missing = row.rank if rank is None else " or ".join(row.num_ranks)
        raise LaunchError(
            f"{row.name} started this process, but {missing} is not set: some of the launcher's "
            f"variables were removed, or are left over from another launch; {row.cure}"
        )
    if not 0 <= rank < num_ranks:
        raise LaunchError(
            f"{row.rank}={rank}, but there are {num_ranks} ranks ({row.num_ranks[0]}): these variables are "
            f"left over from another launch, or come from two launches; {row.cure}"
        )
    local_rank = _number(environ, row.local_rank, row)
    local_size = _number(environ, row.local_size, row)
    node_rank = _number(environ, row.node_rank, row)
    if row.tasks_per_node and environ.get(row.tasks_per_node):
        counts = expand_counts(environ[row.tasks_per_node], variable=row.tasks_per_node)
        if sum(counts) != num_ranks or (node_rank is not None and node_rank >= len(counts)):
            raise LaunchError(
                f"{row.tasks_per_node}={environ[row.tasks_per_node]} does not match {row.num_ranks[0]}={num_ranks} "
                f"and node {node_rank}: these variables come from two launches; {row.cure}"
            )
        if node_rank is not None:
            local_size = counts[node_rank]
    if local_rank is not None and local_size is not None and not 0 <= local_rank < local_size <= num_ranks:
        raise LaunchError(
            f"rank {rank} of {num_ranks} is local rank {local_rank} of {local_size} by the variables of {row.name}, "
            f"which is impossible: the variables come from two launches; {row.cure}"
        )
    return RankIdentity(
        launcher=row.name,
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        node_name=(environ.get(row.host_name) if row.host_name else None) or hostname,
        host_rank=local_rank,
        host_size=local_size,
    )


def _number(environ: Mapping[str, str], names: tuple[str, ...], row: LauncherVariables) -> int | None:
    """Returns the value of the first variable of `names` that is set; None if none is.

    Raises LaunchError if it is not a number.
    """
    for name in names:
        text = environ.get(name)
        if not text:
            continue
        if not (text.isascii() and text.isdigit()):
            raise LaunchError(f"{name}={text!r} is not a number, and {row.name} sets a number: {row.cure}")
        return int(text)
    return None


def _emulate(identity: RankIdentity, text: str, hostname: str) -> RankIdentity:
    """Places the ranks of one machine on emulated nodes of `text` ranks each, in rank order. Raises LaunchError."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LaunchError(
            f"{RANKS_PER_NODE_VARIABLE}={text!r} is not a number of at least 1: unset it, "
            "or set it with `hpctrain launch --ranks-per-node`"
        )
    if identity.host_size is not None and identity.host_size != identity.num_ranks:
        raise LaunchError(
            f"{RANKS_PER_NODE_VARIABLE}={text} emulates nodes on one machine, but only "
            f"{identity.host_size} of the {identity.num_ranks} ranks are on {hostname}: unset "
            f"it to use the real nodes"
        )
    size = int(text)
    node = identity.rank // size
    return RankIdentity(
        launcher=identity.launcher,
        rank=identity.rank,
        num_ranks=identity.num_ranks,
        local_rank=identity.rank % size,
        local_size=min(size, identity.num_ranks - node * size),
        node_rank=node,
        node_name=f"{identity.node_name}/{node}",
        emulated=True,
        ranks_per_node=size,
        host_rank=identity.host_rank,
        host_size=identity.host_size,
    )


def _refuse_torchrun(environ: Mapping[str, str]) -> None:
    if environ.get("RANK") and environ.get("WORLD_SIZE") and environ.get("MASTER_ADDR"):
        raise LaunchError(
            f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are set, as by torchrun or a similar "
            "launcher. hpctrain's ranks are started by mpirun or srun: use "
            f"`hpctrain launch -n {environ['WORLD_SIZE']} -- COMMAND`, or unset RANK, WORLD_SIZE and "
            "MASTER_ADDR to run as one rank"
        )


def cross_check(
    identity: RankIdentity, *, mpi_rank: int, mpi_size: int, container: str = "", library: str = ""
) -> None:
    """Raises TopologyError if MPI reports another rank or number of ranks than the environment.

    Every rank detects such a disagreement by itself, so the ranks need not vote. They could not vote anyway if each
    process is a separate MPI run of one rank.

    container: description of the container of this process (`Surroundings.container`).
    library: name and version of the MPI library that this process has loaded.
    """
    if (identity.rank, identity.num_ranks) == (mpi_rank, mpi_size):
        return
    found = (
        f"this process is rank {identity.rank} of {identity.num_ranks} by {identity.launcher}'s variables"
        if identity.launcher != "none"
        else "no launcher's variables are set, so this should be the only rank"
    )
    reported = f"MPI reports rank {mpi_rank} of {mpi_size}" + (f" ({library})" if library else "")
    cure = cure_for(identity.launcher)
    if mpi_size == 1:
        reason = (
            "The launcher and the MPI library do not belong together: each process runs alone, so that the run "
            f"would be done {identity.num_ranks} times"
        )
        if container:
            reason = (
                f"The MPI library in {container} does not understand the launcher: each of the {identity.num_ranks} "
                f"ranks sees a world of one, so that the whole run would be done {identity.num_ranks} times"
            )
            cure = (
                f"{cure}. If the launcher is inside too, mpi4py has loaded another MPI than the launcher's: build it "
                "with that MPI's compiler (MPICC=PATH make setup). If it is outside, that library must be of the "
                "launcher's family and speak its PMI or PMIx version, so build the image with the site's MPI or one "
                "of its kind, or bind the site's MPI into the container"
            )
    elif mpi_size != identity.num_ranks:
        reason = "The variables are left over from another launch, or another launcher started the ranks"
    else:
        reason = "The two number the ranks differently, so that ranks would use wrong devices and data"
    raise TopologyError(f"{found}, but {reported}. {reason}: {cure}")
