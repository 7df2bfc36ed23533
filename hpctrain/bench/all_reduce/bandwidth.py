"""Bandwidths of an all-reduce as nccl-tests define them, and the least that has to cross the wire. Pure.

Source of the definitions: NVIDIA nccl-tests, doc/PERFORMANCE.md. Of the bound: Patarasuk and Yuan 2009,
Bandwidth optimal all-reduce algorithms for clusters of workstations, theorem 1, with a node for a process.
"""

from __future__ import annotations

from hpctrain.errors import HpctrainError
from hpctrain.reduce.codecs.registry import codec_named


def algorithm_bandwidth(num_bytes: int, *, seconds: float) -> float:
    """Bytes of gradients over the time, bytes/s."""
    return num_bytes / seconds if seconds > 0 else 0.0


def bus_bandwidth(num_bytes: int, *, seconds: float, num_ranks: int) -> float:
    """Algorithm bandwidth times 2 (N-1)/N, bytes/s: what a ring of N ranks would move through each link.

    It does not depend on the number of ranks, so it can be held against the rate of the hardware. For
    fewer bytes on the wire than the gradients have (fp16 for fp32), or less traffic than a flat ring's
    (ranks that share a node), it may be more than that rate.
    """
    return algorithm_bandwidth(num_bytes, seconds=seconds) * 2 * (num_ranks - 1) / num_ranks


def wire_bytes(num_elements: int, *, wire: str) -> int | None:
    """Bytes of so many encoded float32; None where that depends on the gradients (top-k, low-rank, auto)."""
    try:
        return codec_named(wire).num_bytes(num_elements)
    except HpctrainError:
        return None


def bound_bytes(num_elements: int, *, wire: str, num_nodes: int) -> float | None:
    """The least bytes that must leave each node: 2 (C-1)/C times the encoded gradients, C nodes."""
    encoded = wire_bytes(num_elements, wire=wire)
    return None if encoded is None else 2 * (num_nodes - 1) / num_nodes * encoded


def bound_seconds(num_elements: int, *, wire: str, num_nodes: int, link_bytes_per_s: float) -> float | None:
    """The time that the bound's bytes take at the rate of one node's link; None without a bound."""
    least = bound_bytes(num_elements, wire=wire, num_nodes=num_nodes)
    return None if not least else least / link_bytes_per_s
