"""The least bytes that can leave a node, by the kind of algorithm. Pure.

A bound is of the algorithm's own kind, for ranks that are numbered node by node and as many on each node.
"""

from __future__ import annotations

# Summed within the node first: a node sends each element of its sum as one rank would.
TWO_LEVEL = ("hierarchical", "hierarchical-ring", "hierarchical-flat")


def bytes_out_of_a_node(
    algorithm: str, *, numel: int, elem_bytes: float, num_nodes: int, ranks_per_node: int
) -> float:
    """Payload that leaves each node when `numel` elements are summed over all ranks.

    two levels: 2 (C-1)/C n b, C nodes: reduce-scatter and all-gather between nodes.
    ring over P ranks: 2 (P-1)/P n b from each rank to its neighbour; one rank of a node has its neighbour
        outside.
    direct over P ranks, R on a node: each rank sends a P-th of n to each of the P-R ranks outside, twice.
    flat: in fp32 the library's own, held to the ring's. MPI has no 16-bit floats: there the backend exchanges
        slices and gathers the sums, which is direct.
    """
    num_ranks = num_nodes * ranks_per_node
    whole = numel * elem_bytes
    if algorithm in TWO_LEVEL:
        return 2 * (num_nodes - 1) / num_nodes * whole
    if algorithm == "flat":
        algorithm = "ring" if elem_bytes >= 4 else "direct"
    if algorithm == "ring":
        return 2 * (num_ranks - 1) / num_ranks * whole if num_nodes > 1 else 0.0
    if algorithm == "direct":
        return 2 * ranks_per_node * (num_ranks - ranks_per_node) / num_ranks * whole
    raise ValueError(f"no bound is known for the algorithm {algorithm!r}")
