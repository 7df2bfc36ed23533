"""Bytes that the flat collectives send between nodes, computed for a ring over the ranks in order. Pure.

A backend may use another algorithm, but none sends fewer bytes per rank than a ring, so algorithms are compared by
this number. In a ring a rank sends to its successor only: the bytes count if that rank is on another node.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.topology import Topology


def successor_is_elsewhere(rank: int, *, num_ranks: int, topology: Topology | None) -> bool:
    """Returns True if `rank`'s successor in the ring is on another node. topology None: one rank per node."""
    following = (rank + 1) % num_ranks
    if topology is None:
        return following != rank
    return topology.node_of(following) != topology.node_of(rank)


def num_ranks_elsewhere(rank: int, *, num_ranks: int, topology: Topology | None) -> int:
    """Returns the number of ranks on other nodes than `rank`. topology None: one rank per node."""
    if topology is None:
        return num_ranks - 1
    return num_ranks - len(topology.ranks_by_node[topology.node_of(rank)])


def all_reduce_bytes(num_bytes: int, *, num_ranks: int) -> int:
    """Returns the bytes that each rank sends for a buffer of `num_bytes`: 2 (N-1)/N of them."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks


def all_gather_bytes(counts: Sequence[int], *, rank: int) -> int:
    """Returns the bytes that `rank` sends: every rank's part except its successor's."""
    return sum(counts) - counts[(rank + 1) % len(counts)]
