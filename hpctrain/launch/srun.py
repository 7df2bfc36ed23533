"""Options of srun inside a Slurm allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.launch.machine import Machine, MpirunFamily
from hpctrain.launch.placement import Placement, give_way_while_waiting, set_threads
from hpctrain.launch.slurm_counts import expand_counts


def srun_mpi_type(machine: Machine) -> str | None:
    """Returns the `--mpi` type that both srun and the installed MPI support; None if there is none."""
    types = machine.srun.mpi_types if machine.srun else ()
    hydra = machine.mpirun is not None and machine.mpirun.family is MpirunFamily.HYDRA
    wanted = ("pmi2", "pmix", "cray_shasta") if hydra else ("pmix", "cray_shasta")
    if machine.mpirun is None:
        wanted = ("pmix", "cray_shasta", "pmi2")
    for name in wanted:
        match = next((t for t in types if t == name or t.startswith(f"{name}_v")), None)
        if match is not None:
            return match
    return None


def srun_argv(
    placement: Placement,
    *,
    environ: Mapping[str, str],
    machine: Machine,
    updates: dict[str, str],
    removed: list[str],
    notes: list[str],
    nodes: Sequence[str] = (),
) -> list[str]:
    """Returns srun and its options. Adds to `updates` variables to set, to `removed` variables to unset, to `notes`
    lines to print. nodes: those of the allocation to use, by name; none: Slurm chooses."""
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
        set_threads(placement, num_cores=cores, environ=environ, updates=updates)
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
        # This shell is itself a step and holds the cores; or, on named nodes, an earlier step does: of one that lost a
        # node Slurm frees the cores only when it has noticed that, after SlurmdTimeout.
        argv.append("--overlap")
    if environ.get("SLURM_EXPORT_ENV"):
        argv.append(
            "--export=ALL"
        )  # otherwise a job submitted with --export=NONE starts ranks without these settings
    return argv


def _slurm_cores(environ: Mapping[str, str]) -> int | None:
    """Number of cores of the allocation on its smallest node; None if Slurm does not set it."""
    text = environ.get("SLURM_JOB_CPUS_PER_NODE")
    return min(expand_counts(text, variable="SLURM_JOB_CPUS_PER_NODE")) if text else None
