"""Lower bound of a reduction's time between nodes: the bytes that leave a node, divided by the rate of its link. Pure.

A trial can be faster: queues and shapers of a link accept some hundred KB at once, however slow it is. A training step
cannot. So times below this bound are raised to it when candidates are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.reduce.autotune.cost_model import Candidate
from hpctrain.reduce.autotune.link_speed import LinkSpeed
from hpctrain.topology import Topology

WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
ELEMENT_BYTES = 4
TWO_LEVEL = ("hierarchical", "hierarchical-ring", "hierarchical-flat")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFloor:
    """The bound's inputs. ranks_per_node: ranks of the largest node. bytes_per_s: rate of a node's link."""

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    bytes_per_s: float

    @classmethod
    def of(cls, topology: Topology, levels: Iterable[LinkSpeed]) -> LinkFloor | None:
        """Returns the bound; None for one node, or if the links were not measured."""
        rates = [level.bytes_per_s for level in levels if level.axis == "node"]
        if topology.num_nodes == 1 or not rates:
            return None
        return cls(
            num_ranks=topology.num_ranks, num_nodes=topology.num_nodes,
            ranks_per_node=max(len(group) for group in topology.groups("local")), bytes_per_s=rates[0],
        )  # fmt: skip

    def sent(self, candidate: Candidate) -> float:
        """Returns the bytes that leave the busiest node per byte of gradients before the cast; 0 if unknown.

        Two levels and a ring: Patarasuk, Yuan 2009, doi:10.1016/j.jpdc.2008.09.002. `flat` is the backend's own
        algorithm, which does not distinguish nodes: at best a ring over all ranks.
        """
        share = WIRE_BYTES.get(candidate.wire, 0) / ELEMENT_BYTES
        if candidate.algorithm in TWO_LEVEL:
            return share * 2 * (self.num_nodes - 1) / self.num_nodes
        if candidate.algorithm in ("ring", "flat"):
            # Ranks of a node are neighbours in the ring, so one of them sends to the next node.
            return share * 2 * (self.num_ranks - 1) / self.num_ranks
        if candidate.algorithm == "direct":  # each sends a slice to every rank of other nodes, twice
            elsewhere = self.num_ranks - self.ranks_per_node
            return share * 2 * self.ranks_per_node * elsewhere / self.num_ranks
        return 0.0

    def seconds_per_byte(self, candidate: Candidate) -> float:
        """Returns the bound per byte of gradients before the cast, in seconds."""
        return self.sent(candidate) / self.bytes_per_s
