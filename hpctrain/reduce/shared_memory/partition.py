"""Which rank sums which elements of a bucket. Pure planning.

A bucket is cut into chunks, so that the node's sums, the conversions and the wire work on different chunks at
the same time. Each chunk is cut over the carriers of a node, the ranks that have a counterpart on every node;
each carrier's part is cut over the nodes, whose carrier of that place is the owner: it makes the final sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from hpctrain.comm.interface.buffer_checks import balanced_counts
from hpctrain.topology import Topology


@dataclass(frozen=True, slots=True)
class ElemRange:
    """A run of elements of a bucket: begin <= element < end."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


def cut(span: ElemRange, *, num_parts: int) -> list[ElemRange]:
    """Parts as even as can be, in order; some are empty when there are fewer elements than parts."""
    counts = balanced_counts(span.numel, num_parts=num_parts)
    ends = list(accumulate(counts, initial=span.begin))
    return [ElemRange(begin, end) for begin, end in pairwise(ends)]


def chunks_of(numel: int, *, chunk_elems: int) -> list[ElemRange]:
    """Even chunks of at most `chunk_elems`; none for an empty bucket."""
    num_chunks = -(-numel // chunk_elems)
    return cut(ElemRange(0, numel), num_parts=num_chunks) if num_chunks else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelPlace:
    """One rank's part in two-level sums.

    locals: world ranks of this node, in order. local: this rank's place among them.
    column: world rank with this local place on every node, by node; empty for a rank that is no carrier.
    node: this node's place. num_carriers: ranks of the smallest node.
    """

    locals: tuple[int, ...]
    local: int
    column: tuple[int, ...]
    node: int
    num_nodes: int
    num_carriers: int

    @classmethod
    def of(cls, topology: Topology, *, rank: int) -> TwoLevelPlace:
        node, local = topology.node_of(rank), topology.local_rank_of(rank)
        columns = topology.groups("node")
        return cls(
            locals=topology.groups("local")[node],
            local=local,
            column=columns[local] if local < len(columns) else (),
            node=node,
            num_nodes=topology.num_nodes,
            num_carriers=len(columns),
        )


def one_rank_nodes(num_ranks: int) -> Topology:
    """Every rank for itself: the two-level sum over it is the flat one."""
    return Topology(tuple((rank,) for rank in range(num_ranks)), tuple(map(str, range(num_ranks))))
