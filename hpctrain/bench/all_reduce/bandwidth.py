"""Bandwidths of an all-reduce as defined by nccl-tests, and the lower bound on its traffic between nodes.

Source of the definitions: NVIDIA nccl-tests, doc/PERFORMANCE.md. Of the bound: Patarasuk and Yuan 2009,
Bandwidth optimal all-reduce algorithms for clusters of workstations, theorem 1, applied to nodes instead of processes.
"""

from __future__ import annotations

from hpctrain.errors import HpctrainError
from hpctrain.reduce import codec_named


def algorithm_bandwidth(num_bytes: int, *, seconds: float) -> float:
    """Bytes of gradients divided by the time, bytes/s; 0 if no time has passed."""
    return num_bytes / seconds if seconds > 0 else 0.0


def bus_bandwidth(num_bytes: int, *, seconds: float, num_ranks: int) -> float:
    """Algorithm bandwidth times 2 (N-1)/N, bytes/s: the traffic of a ring of N ranks through each link.

    It does not depend on the number of ranks, so that it can be compared with the rate of the hardware. It can exceed
    that rate if the wire format is smaller than the gradients (fp16 for fp32), or if there is less traffic than in a
    flat ring (ranks that share a node).
    """
    return algorithm_bandwidth(num_bytes, seconds=seconds) * 2 * (num_ranks - 1) / num_ranks


def wire_bytes(num_elements: int, *, wire: str) -> int | None:
    """Bytes of `num_elements` encoded float32; None if they depend on the gradients (top-k, low-rank, auto)."""
    try:
        return codec_named(wire).num_bytes(num_elements)
    except HpctrainError:
        return None


def bound_bytes(num_elements: int, *, wire: str, num_nodes: int) -> float | None:
    """Lower bound on the bytes that leave each node: 2 (C-1)/C times the encoded gradients, for C nodes.

    None if the encoded size depends on the gradients.
    """
    encoded = wire_bytes(num_elements, wire=wire)
    return None if encoded is None else 2 * (num_nodes - 1) / num_nodes * encoded


def bound_seconds(num_elements: int, *, wire: str, num_nodes: int, link_bytes_per_s: float) -> float | None:
    """Seconds that `bound_bytes` take at the rate of one node's link; None if there is no bound or it is 0."""
    least = bound_bytes(num_elements, wire=wire, num_nodes=num_nodes)
    return None if not least else least / link_bytes_per_s
