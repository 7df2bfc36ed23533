"""Names of the reduction algorithms, their requirements, and fallbacks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpctrain.errors import UsageError
from hpctrain.reduce.wire_formats import AUTO, wire_format
from hpctrain.topology import Topology


class Algorithm(str, Enum):
    """How buckets are summed over the ranks. The values are the names in the recipe."""

    FLAT = "flat"  # the backend's own all-reduce
    RING = "ring"  # hpctrain's ring over all ranks
    DIRECT = "direct"  # hpctrain's: every rank sends each owner its slice
    HIERARCHICAL = "hierarchical"  # shared memory within a node, direct between nodes
    HIERARCHICAL_RING = "hierarchical-ring"  # shared memory within a node, ring between nodes
    HIERARCHICAL_FLAT = "hierarchical-flat"  # the backend's operations, within and between nodes
    NCCL_HIERARCHICAL = "nccl-hierarchical"  # Horovod's two-level all-reduce
    NCCL_TORUS = "nccl-torus"  # Horovod's 2-D torus


ALGORITHM_NAMES = (AUTO, *(algorithm.value for algorithm in Algorithm))
NCCL_ALGORITHMS = (Algorithm.NCCL_HIERARCHICAL, Algorithm.NCCL_TORUS)

# Algorithms that use the backend's own operations.
LIBRARY_ALGORITHMS = (Algorithm.FLAT, Algorithm.HIERARCHICAL_FLAT, *NCCL_ALGORITHMS)

# `auto` does not try `direct` over all ranks if more ranks than this are on other nodes and sums in two levels are
# possible: these send as many messages as there are other nodes, and a node with r ranks sends 1/r of the bytes.
# `direct` saves two synchronizations within the node, 20 to 70 us; 64 messages each way take longer.
MOST_DIRECT_PEERS = 64
TWO_LEVELS = (Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_RING, Algorithm.HIERARCHICAL_FLAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the ranks of a run can use. This decides which algorithms are available.

    backend: name of the backend that carries out the reductions (`World.reduction_backend`).
    messages: True if point-to-point messages over MPI are available (`World.transport`).
    shared_memory: True if each node's shared memory can hold its ranks' buckets.
    nccl: Horovod's algorithm that is switched on in this process, if any.
    """

    backend: str
    topology: Topology
    messages: bool
    shared_memory: bool = True
    device: str = "cpu"
    nccl: Algorithm | None = None


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The algorithm that runs, and a note for the user if another algorithm was requested."""

    algorithm: Algorithm
    note: str | None = None


def parse_algorithm(name: str) -> Algorithm:
    """Returns the algorithm of this name. Raises UsageError, with the valid names, for an unknown name."""
    try:
        return Algorithm(name)
    except ValueError:
        raise UsageError(
            f"reduction algorithm {name!r}: choose one of {', '.join(ALGORITHM_NAMES)}"
        ) from None


def choose_algorithm(
    asked: Algorithm, *, wire: str, capabilities: Capabilities, sums_itself: bool = False
) -> AlgorithmChoice:
    """Returns the algorithm that runs if `asked` is requested: `asked`, or its fallback with the reason.

    sums_itself: True if the reducer computes the sums in hpctrain. Algorithms that use the backend's own sums are then
    never the fallback.
    """
    algorithm, reasons = asked, []
    while (
        instead := _instead_of(algorithm, wire=wire, capabilities=capabilities, sums_itself=sums_itself)
    ) is not None:
        algorithm, reason = instead
        reasons.append(reason)
    if not reasons:
        return AlgorithmChoice(asked)
    return AlgorithmChoice(
        algorithm, f"reduction: {asked.value} was asked for, {algorithm.value} is used: {'; '.join(reasons)}"
    )


def _instead_of(
    algorithm: Algorithm, *, wire: str, capabilities: Capabilities, sums_itself: bool
) -> tuple[Algorithm, str] | None:
    topology = capabilities.topology
    if topology.num_ranks == 1:
        return (
            (Algorithm.FLAT, "there is nothing to sum on one rank")
            if algorithm is not Algorithm.FLAT
            else None
        )
    sent = wire_format(wire)
    if sent.codec is None:
        if algorithm is not Algorithm.FLAT:
            return Algorithm.FLAT, f"the wire format {wire} uses the backend's own operations"
        return None
    if algorithm in NCCL_ALGORITHMS and capabilities.nccl is not algorithm:
        return Algorithm.HIERARCHICAL, "Horovod does not run it here"
    if algorithm in TWO_LEVELS and topology.num_ranks == topology.num_nodes:
        ring = algorithm is Algorithm.HIERARCHICAL_RING
        return (Algorithm.RING if ring else Algorithm.DIRECT), topology.describe()
    if algorithm is Algorithm.HIERARCHICAL_RING and topology.num_nodes == 1:
        return Algorithm.HIERARCHICAL, topology.describe()
    if algorithm is Algorithm.HIERARCHICAL_FLAT:
        if not sent.summed:
            return Algorithm.HIERARCHICAL, f"the backend cannot sum {wire}"
        if topology.num_nodes == 1:
            return Algorithm.FLAT, topology.describe()
        return None
    if algorithm in TWO_LEVELS and not (capabilities.messages and capabilities.shared_memory):
        why = "the ranks of a node cannot share enough memory"
        if not capabilities.messages:
            why = f"the backend {capabilities.backend} has no point-to-point messages here"
        if sums_itself:
            return Algorithm.DIRECT, why
        if not sent.summed:
            return Algorithm.DIRECT, f"{why}, and the backend cannot sum {wire}"
        return Algorithm.HIERARCHICAL_FLAT, why
    if algorithm is Algorithm.RING and not capabilities.messages:
        return Algorithm.DIRECT, f"the backend {capabilities.backend} has no point-to-point messages here"
    if algorithm is Algorithm.FLAT and not sent.summed:
        return Algorithm.DIRECT, f"the backend cannot sum {wire}"
    return None


def candidates(*, wire: str, capabilities: Capabilities) -> list[Algorithm]:
    """Returns the algorithms that are available without fallback, for `auto` to choose from; never empty.

    On a GPU, only algorithms whose data stay on the GPU are returned: `flat` and Horovod's NCCL algorithms. On CPUs,
    Horovod's algorithms are not returned if hpctrain's own algorithms are available, because a trial, which times a
    reduction alone, does not show the CPU time that Horovod's thread takes from training.
    """
    if capabilities.topology.num_ranks == 1:
        return [Algorithm.FLAT]
    offered = list(Algorithm)
    if capabilities.device == "cuda":
        offered = [Algorithm.FLAT, *NCCL_ALGORITHMS]
    elif capabilities.backend == "horovod" and capabilities.messages:
        offered = [a for a in offered if a not in LIBRARY_ALGORITHMS]
    found = [a for a in offered if choose_algorithm(a, wire=wire, capabilities=capabilities).note is None]
    if Algorithm.HIERARCHICAL in found and _ranks_elsewhere(capabilities.topology) > MOST_DIRECT_PEERS:
        found = [a for a in found if a is not Algorithm.DIRECT]
    return found or [choose_algorithm(Algorithm.FLAT, wire=wire, capabilities=capabilities).algorithm]


def _ranks_elsewhere(topology: Topology) -> int:
    """Returns the number of ranks that are not on the largest node."""
    return topology.num_ranks - max(len(ranks) for ranks in topology.ranks_by_node)
