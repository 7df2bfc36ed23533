"""Placement of ranks on nodes, and the environment of ranks that share a node's cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.errors import LaunchError
from hpctrain.launch.yielding import PRELOAD_VARIABLE, YIELD_VARIABLE, with_preload, yields

_OTHER_ALLOCATIONS = ("PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Number of ranks and nodes. `num_nodes` is None if only mpirun knows the scheduler's number of nodes."""

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
    """Places ranks on the nodes of `hosts` or the scheduler's allocation; on one machine with `ranks_per_node` less
    than `num_ranks` it emulates nodes. Appends to `notes`. Raises LaunchError if there are too few nodes."""
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


def set_threads(
    placement: Placement, *, num_cores: int, environ: Mapping[str, str], updates: dict[str, str]
) -> None:
    """Sets OMP_NUM_THREADS to a rank's share of the cores, unless the user has set it."""
    if not environ.get("OMP_NUM_THREADS"):
        # Without it every rank starts one thread per core, which is ranks x cores threads on the machine.
        updates["OMP_NUM_THREADS"] = str(max(1, num_cores // placement.ranks_on_a_node))


def give_way_while_waiting(
    environ: Mapping[str, str], *, updates: dict[str, str], library: str | None, notes: list[str]
) -> None:
    """Sets the environment so that ranks that outnumber the cores sleep while they wait.

    Open MPI polls while it waits, on a core that the awaited rank may need. On some kernels it keeps that rank from
    running even if it is set to yield (sched_yield). library: path of the library that turns yields into short sleeps.
    """
    if not environ.get(YIELD_VARIABLE):
        updates[YIELD_VARIABLE] = "1"
    if yields(environ):
        preload_sleep(environ, updates=updates, library=library, notes=notes)


def preload_sleep(
    environ: Mapping[str, str], *, updates: dict[str, str], library: str | None, notes: list[str]
) -> None:
    """Lets the ranks preload the library that turns yields into short sleeps. MPICH yields without being asked to."""
    if library is not None:
        updates[PRELOAD_VARIABLE] = with_preload(environ, library)
    else:
        notes.append(
            "the library that lets waiting ranks sleep was not compiled: on Linux 6.18 and newer, ranks may wait for "
            "seconds; install a C compiler, then install hpctrain again (make setup)"
        )
