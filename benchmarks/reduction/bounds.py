"""The minimum number of bytes that leave a node in an all-reduce, by kind of algorithm. Pure functions.

Each bound is for one kind of algorithm. Ranks are numbered node by node, with equally many on each node.
"""

from __future__ import annotations

# Algorithms that sum within the node first: a node then sends as many bytes as a single rank would.
TWO_LEVEL = ("hierarchical", "hierarchical-ring", "hierarchical-flat")


def bytes_out_of_a_node(
    algorithm: str, *, numel: int, elem_bytes: float, num_nodes: int, ranks_per_node: int
) -> float:
    """Returns the bytes of payload that leave each node when `numel` elements of `elem_bytes` bytes are summed.

    two levels: 2 (C-1)/C n b for C nodes: reduce-scatter and all-gather between nodes.
    ring over P ranks: 2 (P-1)/P n b from each rank to its neighbour; one rank of a node has its neighbour
        on another node.
    direct over P ranks, R on a node: each rank sends n/P elements to each of the P-R ranks on other nodes, twice.
    flat: in fp32 the library's own algorithm, compared with the bound of the ring. MPI has no 16-bit floats, so the
        backend exchanges slices and gathers the sums, as direct does.
    Raises ValueError for an unknown algorithm.
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
