"""Options of mpirun: Open MPI 4, Open MPI 5, and Hydra (MPICH, Intel MPI)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.launch.machine import Machine, MpirunFamily
from hpctrain.launch.placement import Placement, give_way_while_waiting, preload_sleep, set_threads
from hpctrain.launch.rank_identity.identity import RANKS_PER_NODE_VARIABLE

# mpirun passes its environment to ranks on its own machine; to other machines only the variables that are listed.
_CARRIED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")
_CARRIED_PREFIXES = ("HPCTRAIN_", "HOROVOD_", "NCCL_", "UCX_", "OMP_", "HDF5_", "TORCH_", "CUDA_")
_REACHABLE = "OMPI_MCA_reachable"


def mpirun_argv(
    placement: Placement,
    *,
    environ: Mapping[str, str],
    machine: Machine,
    updates: dict[str, str],
    hosts: Sequence[str],
    hostfile: str | None,
    notes: list[str],
) -> list[str]:
    """Returns mpirun and its options. Adds to `updates` variables for its environment, to `notes` lines to print."""
    assert machine.mpirun is not None
    family = machine.mpirun.family
    set_threads(placement, num_cores=machine.num_cores, environ=environ, updates=updates)
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
    """Options of Hydra, which passes its whole environment to all ranks and lets ranks share cores by default."""
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
