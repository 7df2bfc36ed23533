"""Conclusions from a probe of the nodes: which nodes, links and ranks are slower than usual. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm import describe_ranks
from hpctrain.topology import Topology

# A link is slow below this share of the usual bandwidth. The measured bandwidths of intact links differ by less than a
# factor of 2.
SLOW_SHARE = 0.5
# Latencies vary more, and a short one does no harm.
SLOW_LATENCY = 5.0
LEAST_LATENCY_S = 200e-6
# A rank whose core is shared with one other process has half of the usual speed.
SLOW_RANK_SHARE = 0.7


class Quantity(Enum):
    """Quantities that the probe measures: bandwidth and latency of links, memory bandwidth and arithmetic of ranks."""

    BANDWIDTH = "bandwidth"
    LATENCY = "latency"
    MEMORY = "memory bandwidth"
    ARITHMETIC = "arithmetic"


UNITS = {
    Quantity.BANDWIDTH: (1e6, "MB/s"),
    Quantity.LATENCY: (1e-6, "us"),
    Quantity.MEMORY: (1e9, "GB/s"),
    Quantity.ARITHMETIC: (1e9, "GFLOP/s"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """Speed of one node's link.

    bytes_per_s: median bandwidth over the partner nodes.
    latency_s: median latency over the partner nodes, in seconds.
    slowest_partner: index of the partner node with the lowest bandwidth.
    slowest_bytes_per_s: bandwidth between the node and its slowest partner.
    """

    bytes_per_s: float
    latency_s: float
    slowest_partner: int
    slowest_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeeds:
    """Speeds of all ranks, as arrays of shape (ranks,).

    memory_bytes_per_s: bytes that a copy reads and writes per second.
    flop_per_s: floating-point operations per second in a float32 matrix product.
    seconds: duration of the measurement.
    """

    memory_bytes_per_s: NDArray[np.float64]
    flop_per_s: NDArray[np.float64]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPair:
    """Two nodes between which messages are slower than between each of the two and most other nodes."""

    nodes: tuple[int, int]
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFinding:
    """Nodes or ranks that are slower than usual.

    quantity: the quantity that is worse than usual.
    nodes: names of nodes. One node: the link of this node is slow, or ranks on this node are slow. Two nodes: the link
    between them is slow. More nodes: the links of most nodes are slow.
    ranks: all ranks on these nodes or, for memory and arithmetic, the slow ranks.
    value: measured value.
    usual: usual value: the median of the nodes or ranks or, if `before`, the value earlier in the run.
    before: True if `usual` was measured earlier in the run.
    """

    quantity: Quantity
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    value: float
    usual: float
    before: bool = False

    def describe(self) -> str:
        scale, unit = UNITS[self.quantity]
        if self.quantity in (Quantity.MEMORY, Quantity.ARITHMETIC):
            who, usual = f"{describe_ranks(self.ranks)} ({self.nodes[0]})", "the median of the ranks is"
        elif len(self.nodes) == 1:
            who, usual = f"{self.nodes[0]} to the other nodes", "the median of the nodes is"
        elif len(self.nodes) == 2:
            who, usual = f"between {self.nodes[0]} and {self.nodes[1]}", "the median of the nodes is"
        else:
            who, usual = f"between {len(self.nodes)} nodes", "the median of the nodes is"
        if self.before:
            usual = "it was"
        return (
            f"slow {self.quantity.value}: {who} {self.value / scale:.3g} {unit}, {usual} "
            f"{self.usual / scale:.3g} {unit}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "quantity": self.quantity.value, "nodes": list(self.nodes), "ranks": list(self.ranks),
            "value": self.value, "usual": self.usual, "before": self.before, "text": self.describe(),
        }  # fmt: skip


def slow_links(
    links: Sequence[NodeLink],
    pairs: Sequence[SlowPair],
    *,
    topology: Topology,
    before: Sequence[NodeLink] | None = None,
) -> list[ProbeFinding]:
    """Returns the slow links between nodes.

    links: the link of each node.
    pairs: the slow pairs of nodes.
    before: earlier measurement of the same nodes; None if there is no earlier measurement. With `before`, a link is
    also slow if its bandwidth has dropped to less than half of the earlier value. With two nodes, no other criterion
    can be met.
    """
    rates = [link.bytes_per_s for link in links]
    latencies = [link.latency_s for link in links]
    usual_rate, usual_latency = statistics.median_high(rates), statistics.median_low(latencies)
    slow = {node: usual_rate for node, rate in enumerate(rates) if rate < SLOW_SHARE * usual_rate}
    found = [_of_nodes(topology, [node], Quantity.BANDWIDTH, rates[node], usual_rate) for node in slow]
    if before is not None:
        slower = [node for node, rate in enumerate(rates) if rate < SLOW_SHARE * before[node].bytes_per_s]
        if 2 * len(slower) > len(rates):  # most nodes, so that the median of the nodes is slow as well
            value, usual = statistics.median_high(rates), statistics.median(b.bytes_per_s for b in before)
            found = [_of_nodes(topology, slower, Quantity.BANDWIDTH, value, usual, before=True)]
        else:
            found += [
                _of_nodes(
                    topology, [node], Quantity.BANDWIDTH, rates[node], before[node].bytes_per_s, before=True
                )
                for node in slower
                if node not in slow
            ]
    found += [
        _of_nodes(topology, pair.nodes, Quantity.BANDWIDTH, pair.bytes_per_s, usual_rate)
        for pair in pairs
        if not slow.keys() & set(pair.nodes)
    ]
    found += [
        _of_nodes(topology, [node], Quantity.LATENCY, latency, usual_latency)
        for node, latency in enumerate(latencies)
        if latency > max(SLOW_LATENCY * usual_latency, usual_latency + LEAST_LATENCY_S)
    ]
    return found


def slow_speeds(values: NDArray[np.float64], *, quantity: Quantity, topology: Topology) -> list[ProbeFinding]:
    """Returns the ranks whose memory or arithmetic is clearly slower than the median of the ranks, grouped by node.

    values: speed of each rank, shape (ranks,).
    """
    usual = float(statistics.median_high(values.tolist()))
    found: dict[int, list[int]] = {}
    for rank in np.flatnonzero(values < SLOW_RANK_SHARE * usual).tolist():
        found.setdefault(topology.node_of(rank), []).append(rank)
    return [
        ProbeFinding(
            quantity=quantity, nodes=(topology.node_names[node],), ranks=tuple(ranks),
            value=float(np.quantile(values[ranks], 0.5)), usual=usual,
        )
        for node, ranks in found.items()
    ]  # fmt: skip


def _of_nodes(
    topology: Topology,
    nodes: Sequence[int],
    quantity: Quantity,
    value: float,
    usual: float,
    *,
    before: bool = False,
) -> ProbeFinding:
    return ProbeFinding(
        quantity=quantity, nodes=tuple(topology.node_names[node] for node in nodes),
        ranks=tuple(sorted(rank for node in nodes for rank in topology.ranks_by_node[node])),
        value=value, usual=usual, before=before,
    )  # fmt: skip


def document(
    *,
    topology: Topology,
    links: Sequence[NodeLink] | None,
    ranks: RankSpeeds,
    findings: Sequence[ProbeFinding],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the JSON document of a probe, with one entry per node.

    The entry `slow_nodes` lists each node that is the only node of a finding, so that a run can leave these nodes out.

    about: additional entries of the document, such as the time.
    """
    nodes = []
    for number, (name, members) in enumerate(zip(topology.node_names, topology.ranks_by_node, strict=True)):
        here = list(members)
        node: dict[str, Any] = {
            "node": name,
            "memory_bytes_per_s": float(ranks.memory_bytes_per_s[here].sum()),
            "flop_per_s": float(ranks.flop_per_s[here].sum()),
        }
        if links is not None:
            link = links[number]
            node |= {
                "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s,
                "slowest_partner": topology.node_names[link.slowest_partner],
                "slowest_bytes_per_s": link.slowest_bytes_per_s,
            }  # fmt: skip
        nodes.append(node)
    return {
        **about,
        "slow_nodes": sorted({finding.nodes[0] for finding in findings if len(finding.nodes) == 1}),
        "findings": [finding.to_json() for finding in findings],
        "nodes": nodes,
    }
