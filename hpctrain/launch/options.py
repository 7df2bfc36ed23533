"""The options of the launchers mpirun and srun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.launch.placement import (
    LocalMachine,
    MpirunFamily,
    Placement,
    give_way_while_waiting,
    preload_sleep,
    set_omp_threads,
)
from hpctrain.launch.rank_identity.identity import RANKS_PER_NODE_VARIABLE, expand_counts

# mpirun passes its environment to ranks on its own machine; to other machines only the variables that are listed.
_CARRIED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")
_CARRIED_PREFIXES = ("HPCTRAIN_", "HOROVOD_", "NCCL_", "UCX_", "OMP_", "HDF5_", "TORCH_", "CUDA_")
_REACHABLE = "OMPI_MCA_reachable"


def mpirun_argv(
    placement: Placement,
    *,
    environ: Mapping[str, str],
    machine: LocalMachine,
    updates: dict[str, str],
    hosts: Sequence[str],
    hostfile: str | None,
    notes: list[str],
) -> list[str]:
    """Returns mpirun and its options, for Open MPI 4, Open MPI 5 and Hydra (MPICH, Intel MPI).

    Adds variables for mpirun's environment to `updates`, and messages for the user to `notes`.
    """
    assert machine.mpirun is not None
    family = machine.mpirun.family
    set_omp_threads(placement, num_cores=machine.num_cores, environ=environ, updates=updates)
    outnumbered = placement.ranks_on_a_node > machine.num_cpus
    if outnumbered:
        notes.append(
            f"{placement.ranks_on_a_node} ranks share {machine.num_cpus} cores of this machine: "
            "good for trying things out, not for measuring"
        )
    if family is MpirunFamily.HYDRA:
        if outnumbered:
            preload_sleep(environ, updates=updates, library=machine.yield_library, notes=notes)
        return _hydra(placement, path=machine.mpirun.path, hosts=hosts, hostfile=hostfile)
    if family is MpirunFamily.UNKNOWN:
        notes.append(
            f"{machine.mpirun.path} is an unknown mpirun ({machine.mpirun.version}): only -n is passed"
        )
        return [machine.mpirun.path, "-n", str(placement.num_ranks)]
    if outnumbered:
        give_way_while_waiting(environ, updates=updates, library=machine.yield_library, notes=notes)
    if machine.is_root:
        updates.update({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    argv = [machine.mpirun.path, "-n", str(placement.num_ranks)]
    per_node = placement.ranks_per_node if placement.ranks_per_node and not placement.on_one_machine else None
    argv += ["--map-by", f"{f'ppr:{per_node}:node' if per_node else 'slot'}:OVERSUBSCRIBE"]
    if not environ.get("OMPI_MCA_hwloc_base_binding_policy") and not environ.get(
        "PRTE_MCA_hwloc_default_binding_policy"
    ):
        # Open MPI binds a rank to one core if there are two ranks, and to a socket if there are more: the threads of
        # the loader and of torch would share that core. A site can set the variables above to bind ranks.
        argv += ["--bind-to", "none"]
    # odls_base_sigkill_timeout, from one rank's failure to SIGKILL for the others, stays at its default of 1 s.
    # A stop with a save uses SIGUSR1 and ends in a barrier, so it needs no more time. A rank that waits inside
    # MPI for a dead rank does not handle SIGTERM, so more time would not help; and mpirun waits for it twice.
    if placement.on_one_machine and not hosts:
        # All ranks are on this machine: no ssh and no daemon, even inside an allocation.
        if family is MpirunFamily.OPEN_MPI_4:
            return [*argv, "--mca", "plm", "isolated"]
        if not environ.get(_REACHABLE):
            # Debian's Open MPI 5 prints a warning for each rank where a card has IPv4 and IPv6: its module netlink
            # finds no pair of addresses. Ranks of one machine use shared memory. The list may exclude what is missing.
            updates[_REACHABLE] = "^netlink"
        return argv
    if hostfile is not None:
        argv += ["--hostfile", hostfile]
    elif hosts:
        slots = placement.ranks_on_a_node
        argv += ["--host", ",".join(f"{host}:{slots}" for host in dict.fromkeys(hosts))]
    carried = {n for n in environ if n in _CARRIED or n.startswith(_CARRIED_PREFIXES)} | set(updates)
    carried -= {RANKS_PER_NODE_VARIABLE} | {name for name in carried if name.startswith("OMPI_")}
    for name in sorted(carried):
        argv += ["-x", name]
    return argv


def _hydra(placement: Placement, *, path: str, hosts: Sequence[str], hostfile: str | None) -> list[str]:
    """Returns Hydra and its options.

    Hydra passes its whole environment to all ranks, and lets ranks share cores by default.
    """
    argv = [path, "-n", str(placement.num_ranks)]
    if placement.on_one_machine and not hosts:
        return [*argv, "-launcher", "fork"]
    if placement.ranks_per_node is not None:
        argv += ["-ppn", str(placement.ranks_per_node)]
    if hostfile is not None:
        argv += ["-f", hostfile]
    elif hosts:
        argv += ["-hosts", ",".join(dict.fromkeys(hosts))]
    return argv


# The values of srun's --mpi that start ranks of an MPI, the best first. Slurm lists cray_shasta on other machines too,
# and Open MPI cannot use it: each rank would be a run of its own.
_MPI_TYPES: dict[MpirunFamily | None, tuple[str, ...]] = {
    MpirunFamily.OPEN_MPI_4: ("pmix",),
    MpirunFamily.OPEN_MPI_5: ("pmix",),
    MpirunFamily.HYDRA: ("pmi2", "pmix", "cray_shasta"),
    MpirunFamily.UNKNOWN: ("pmix", "cray_shasta"),
    None: ("pmix", "cray_shasta", "pmi2"),
}


def srun_mpi_type(machine: LocalMachine) -> str | None:
    """Returns the `--mpi` type that both srun and the installed MPI support; None if there is none."""
    types = machine.srun.mpi_types if machine.srun else ()
    wanted = _MPI_TYPES[machine.mpirun.family if machine.mpirun else None]
    for name in wanted:
        match = next((t for t in types if t == name or t.startswith(f"{name}_v")), None)
        if match is not None:
            return match
    return None


def srun_argv(
    placement: Placement,
    *,
    environ: Mapping[str, str],
    machine: LocalMachine,
    updates: dict[str, str],
    removed: list[str],
    notes: list[str],
    nodes: Sequence[str] = (),
) -> list[str]:
    """Returns srun and its options.

    Adds variables to set to `updates`, variables to unset to `removed`, and messages for the user to `notes`.

    nodes: nodes of the allocation to use, by name; if empty, Slurm chooses.
    """
    assert machine.srun is not None
    argv = [machine.srun.path]
    mpi_type = srun_mpi_type(machine)
    if mpi_type is not None:
        argv.append(f"--mpi={mpi_type}")
        if mpi_type.startswith("pmix") and "SLURM_PMIX_FENCE" not in environ:
            # With the default, a tree, ranks left MPI_Init before all had entered it (Slurm 22.05, Open MPI 4.1.4).
            updates["SLURM_PMIX_FENCE"] = "ring"
    else:
        found = machine.srun.failure or "srun lists no MPI type that is known to work"
        notes.append(f"{found}: the cluster's default is used")
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "1"):
        notes.append(
            "this job is heterogeneous, and srun starts these ranks in its first component only: for ranks in all of "
            "them call srun yourself, with --het-group=0,1 and so on"
        )
    num_nodes = placement.num_nodes or 1
    argv += [f"--nodes={num_nodes}", f"--ntasks={placement.num_ranks}"]
    if nodes:
        argv.append(f"--nodelist={','.join(nodes[:num_nodes])}")
    per_node = placement.ranks_on_a_node
    if placement.num_ranks == per_node * num_nodes:
        argv += [f"--ntasks-per-node={per_node}", "--distribution=block"]
    else:
        # If the last node has fewer ranks, srun ignores --ntasks-per-node; a plane of per_node tasks fills each node.
        argv.append(f"--distribution=plane={per_node}")
        removed += [name for name in ("SLURM_NTASKS_PER_NODE",) if name in environ]
    argv.append("--kill-on-bad-exit=1")
    cores = _slurm_cores(environ) or machine.num_cpus
    if per_node > cores:
        argv.append("--overcommit")
        set_omp_threads(placement, num_cores=cores, environ=environ, updates=updates)
        if machine.mpirun is None or machine.mpirun.family is not MpirunFamily.HYDRA:
            give_way_while_waiting(environ, updates=updates, library=machine.yield_library, notes=notes)
        notes.append(
            f"{per_node} ranks on a node share {cores} cores: good for trying things out, not for measuring"
        )
        removed += [name for name in ("SLURM_CPUS_PER_TASK",) if name in environ]
    else:
        # Since Slurm 22.05 a step does not inherit the job's --cpus-per-task.
        asked = environ.get("SLURM_CPUS_PER_TASK", "")
        cores_per_rank = int(asked) if asked.isdigit() else cores // per_node
        argv.append(f"--cpus-per-task={cores_per_rank}")
        if not environ.get("OMP_NUM_THREADS"):
            updates["OMP_NUM_THREADS"] = str(cores_per_rank)
    if nodes or environ.get("SLURM_STEP_ID"):
        # This shell is itself a step and occupies the cores; or, on named nodes, an earlier step does: if that lost a
        # node, Slurm frees its cores only when it has noticed the loss, after SlurmdTimeout.
        argv.append("--overlap")
    if environ.get("SLURM_EXPORT_ENV"):
        argv.append(
            "--export=ALL"
        )  # otherwise a job submitted with --export=NONE starts ranks without these settings
    return argv


def _slurm_cores(environ: Mapping[str, str]) -> int | None:
    """Returns the number of cores that the allocation has on its smallest node; None if Slurm does not state it."""
    text = environ.get("SLURM_JOB_CPUS_PER_NODE")
    return min(expand_counts(text, variable="SLURM_JOB_CPUS_PER_NODE")) if text else None
