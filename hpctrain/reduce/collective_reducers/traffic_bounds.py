"""What the flat collectives cost on the wire, by the bound of a ring over the ranks in order. Pure.

A backend may use another algorithm; none sends less in all than a ring's rank for each of its bytes, so this
is the number that algorithms are compared by. A rank sends to its successor only: the bytes count where that
one sits on another node.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.topology import Topology


def successor_is_elsewhere(rank: int, *, num_ranks: int, topology: Topology | None) -> bool:
    """Whether `rank`'s successor in the ring sits on another node. No topology: every rank is a node."""
    following = (rank + 1) % num_ranks
    if topology is None:
        return following != rank
    return topology.node_of(following) != topology.node_of(rank)


def num_ranks_elsewhere(rank: int, *, num_ranks: int, topology: Topology | None) -> int:
    """How many ranks sit on other nodes than `rank`. No topology: every rank is a node."""
    if topology is None:
        return num_ranks - 1
    return num_ranks - len(topology.ranks_by_node[topology.node_of(rank)])


def all_reduce_bytes(num_bytes: int, *, num_ranks: int) -> int:
    """Bytes that each rank sends for a buffer of `num_bytes`: 2 (N-1)/N of them."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks


def all_gather_bytes(counts: Sequence[int], *, rank: int) -> int:
    """Bytes that `rank` sends: every rank's part but its successor's, which that one has."""
    return sum(counts) - counts[(rank + 1) % len(counts)]
