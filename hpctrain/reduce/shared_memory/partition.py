"""Partition of a bucket: which rank sums which elements. Pure planning.

A bucket is split into chunks, so that the node's sums, the conversions and the network work on different chunks at
the same time. Each chunk is split over the carriers of a node, the ranks that have a counterpart on every node;
each carrier's part is split over the nodes into slices. The carrier with the same local rank on that node owns the
slice: it computes the final sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology


@dataclass(frozen=True, slots=True)
class ElemRange:
    """A range of elements of a bucket: begin <= element < end."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


def cut(span: ElemRange, *, num_parts: int) -> list[ElemRange]:
    """Splits `span` into parts of equal length within one element; some are empty if it has fewer elements."""
    counts = split_evenly(span.numel, num_parts=num_parts)
    ends = list(accumulate(counts, initial=span.begin))
    return [ElemRange(begin, end) for begin, end in pairwise(ends)]


def chunks_of(numel: int, *, chunk_elems: int) -> list[ElemRange]:
    """Returns even chunks of at most `chunk_elems` elements; none for an empty bucket."""
    num_chunks = -(-numel // chunk_elems)
    return cut(ElemRange(0, numel), num_parts=num_chunks) if num_chunks else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelPlace:
    """One rank's position in two-level sums.

    locals: world ranks of this node, in order. local: this rank's index among them.
    column: for each node, the world rank with this local index; empty if this rank is not a carrier.
    node: index of this node. num_carriers: number of ranks of the smallest node.
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
        by_node = topology.groups("local")
        num_carriers = min(map(len, by_node))
        return cls(
            locals=by_node[node],
            local=local,
            # Of `topology.groups("node")` only the own group, since all of them hold every rank of the run.
            column=tuple(ranks[local] for ranks in by_node) if local < num_carriers else (),
            node=node,
            num_nodes=topology.num_nodes,
            num_carriers=num_carriers,
        )


def one_rank_nodes(num_ranks: int) -> Topology:
    """Returns a topology with one rank per node, with which the two-level sum is a flat one."""
    return Topology(tuple((rank,) for rank in range(num_ranks)), tuple(map(str, range(num_ranks))))


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """`numel` contiguous elements of one gradient.

    first: their offset in a range of a bucket. position: their offset in the sequence of all gradients.
    """

    first: int
    position: int
    numel: int


def gradient_pieces(bucket: Bucket, span: ElemRange) -> Iterator[GradientPiece]:
    """Yields the part of each gradient that is in the elements `span` of `bucket`.

    What else a bucket holds, its gap and its flags, is left out.
    """
    for slot in bucket.slots:
        begin, end = max(span.begin, slot.offset), min(span.end, slot.offset + slot.numel)
        if begin < end:
            yield GradientPiece(begin - span.begin, slot.position + begin - slot.offset, end - begin)
