"""How many ranks go on how many nodes, and how the ranks of one node share its cores. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.errors import LaunchError
from hpctrain.launch.yielding import PRELOAD_VARIABLE, YIELD_VARIABLE, with_preload, yields

_OTHER_ALLOCATIONS = ("PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks on nodes. `num_nodes` is None where the scheduler's node count is known to mpirun alone."""

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
    num_nodes: int | None = 1
    where = "this machine is"
    if hosts:
        num_nodes, where = len(set(hosts)), f"{len(set(hosts))} hosts are"
    elif environ.get("SLURM_JOB_ID"):
        text = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
        if not text.isdigit() or int(text) < 1:
            raise LaunchError(
                f"SLURM_JOB_NUM_NODES={text!r} is no number of nodes: unset it, or get a new allocation"
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
        notes.append(f"{num_nodes} nodes are at hand, and {num_ranks} ranks use {num_ranks} of them at most")
        num_nodes = num_ranks
    return Placement(
        num_ranks=num_ranks, ranks_per_node=ranks_per_node, num_nodes=num_nodes, emulated=emulated
    )


def set_threads(
    placement: Placement, *, num_cores: int, environ: Mapping[str, str], updates: dict[str, str]
) -> None:
    """Set a rank's threads to its part of the cores, unless the user has set them."""
    if not environ.get("OMP_NUM_THREADS"):
        # Without it every rank starts one thread a core, and ranks x cores threads fight for the cores.
        updates["OMP_NUM_THREADS"] = str(max(1, num_cores // placement.ranks_on_a_node))


def give_way_while_waiting(
    environ: Mapping[str, str], *, updates: dict[str, str], library: str | None, notes: list[str]
) -> None:
    """Have ranks that outnumber the cores give theirs up while they wait.

    Open MPI polls while it waits, on a core that the rank it waits for may need; asked to yield instead, it keeps that
    rank from running on some kernels. library: turns its yielding into short sleeps.
    """
    if not environ.get(YIELD_VARIABLE):
        updates[YIELD_VARIABLE] = "1"
    if not yields(environ):
        return
    if library is not None:
        updates[PRELOAD_VARIABLE] = with_preload(environ, library)
    else:
        notes.append(
            "the library that lets waiting ranks sleep was not compiled: on Linux 6.18 and newer ranks may wait for "
            "seconds; install a C compiler, then hpctrain again (make setup)"
        )
