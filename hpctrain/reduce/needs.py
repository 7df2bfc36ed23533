"""Computes the memory and the messages that a rank needs to reduce the gradients of a step. Pure.

`reduction_needs` is for runs in which every rank has all gradients, `scatter_needs` for a sharded optimizer, and
`sharded_sum` for sharded parameters.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from hpctrain.reduce.algorithms import (
    LIBRARY_ALGORITHMS,
    Algorithm,
    Capabilities,
    choose_algorithm,
    parse_algorithm,
)
from hpctrain.reduce.codecs import codec_named
from hpctrain.reduce.collective_reducers.collective_reducer import wire_dtype
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.shared_memory.shared_buckets import capacity_of
from hpctrain.reduce.wire_formats import AUTO, encodes_every_value, needs_feedback, wire_format
from hpctrain.topology import Topology

# Of `TransportReducer` and the updater: elements of a chunk, chunks of a bucket and buckets in flight.
_CHUNK_ELEMS = 1 << 19
_CHUNKS_IN_FLIGHT = 4
_BUCKETS_IN_FLIGHT = 4
# A rank keeps the residual at the start of a step and the new one.
_RESIDUALS = 2
# Of a `ZeroUpdater`: a unit is filled and one is on its way to be freed, while others are reduced.
_SLOTS = _BUCKETS_IN_FLIGHT + 2
# Without memory for all gradients, a bucket is reduced in this many units, and there is memory for two buckets.
_UNITS_OF_A_BUCKET = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionNeeds:
    """Memory and messages that the reductions of a step need on one rank, in bytes.

    algorithm: the algorithm that runs.
    buckets: memory of the buckets: gradients, gaps and flags.
    spare: additional memory of ranks that share memory, so that the same gradients can be divided into other buckets.
    wire: largest memory of copies in the wire format and of messages in flight.
    residuals: memory of error feedback.
    sent: bytes sent to other ranks per step, as the mean over the ranks. Bytes that the ranks of a node read from each
    other's memory do not count.
    sent_between_nodes: the part of `sent` that goes to other nodes.
    """

    algorithm: Algorithm
    buckets: int
    spare: int = 0
    wire: int = 0
    residuals: int = 0
    sent: int = 0
    sent_between_nodes: int = 0


def reduction_needs(
    buckets: Sequence[Bucket], *, algorithm: Algorithm, wire: str, capabilities: Capabilities
) -> ReductionNeeds:
    """Returns what `algorithm`, or its fallback if `algorithm` is not available, needs for `buckets`.

    wire: a wire format other than `auto`. If the format sends everything in the first steps, the result is for the
    later steps.
    """
    runs = choose_algorithm(algorithm, wire=wire, capabilities=capabilities).algorithm
    held = sum(_bytes_of(bucket) for bucket in buckets)
    num_ranks, num_nodes = capabilities.topology.num_ranks, capabilities.topology.num_nodes
    if num_ranks == 1:
        return ReductionNeeds(algorithm=runs, buckets=held)
    # In a ring over the ranks in order, one rank of each node sends to another node.
    ring_share = num_nodes / num_ranks if num_nodes > 1 else 0.0
    residuals = _RESIDUALS * sum(
        slot.numel * bucket.dtype.itemsize for bucket in buckets for slot in bucket.slots
    )
    if not encodes_every_value(wire):
        held_for_wire, sent = wire_format(wire).imported().needs(buckets, num_ranks=num_ranks)
        return ReductionNeeds(
            algorithm=runs, buckets=held, wire=held_for_wire, residuals=residuals if needs_feedback(wire) else 0,
            sent=sent, sent_between_nodes=int(sent * ring_share),
        )  # fmt: skip
    return _of_every_value(
        buckets, runs, wire=wire, capabilities=capabilities, held=held, residuals=residuals
    )


def _of_every_value(
    buckets: Sequence[Bucket],
    runs: Algorithm,
    *,
    wire: str,
    capabilities: Capabilities,
    held: int,
    residuals: int,
) -> ReductionNeeds:
    """Returns the needs of a wire format that sends every value."""
    topology = capabilities.topology
    num_ranks, num_nodes = topology.num_ranks, topology.num_nodes
    smallest = min(len(ranks) for ranks in topology.ranks_by_node)
    encoded = sum(codec_named(wire).num_bytes(bucket.numel, dtype=bucket.dtype) for bucket in buckets)
    around = 2 * encoded * (num_ranks - 1) // num_ranks
    between_nodes = 2 * encoded * (num_nodes - 1) // num_nodes // smallest
    if runs in LIBRARY_ALGORITHMS:
        # A bucket that is sent in another dtype has a copy in it.
        cast = sum(
            bucket.numel * dtype.itemsize
            for bucket in buckets
            if (dtype := wire_dtype(wire, bucket=bucket.dtype)) != bucket.dtype
        )
        if runs is Algorithm.FLAT:
            far = int(around * num_nodes / num_ranks) if num_nodes > 1 else 0
            return ReductionNeeds(
                algorithm=runs, buckets=held, wire=cast, sent=around, sent_between_nodes=far
            )
        within = 2 * encoded * (smallest - 1) // smallest
        return ReductionNeeds(
            algorithm=runs, buckets=held, wire=cast, sent=within + between_nodes,
            sent_between_nodes=between_nodes,
        )  # fmt: skip
    two_levels = runs in (Algorithm.HIERARCHICAL, Algorithm.HIERARCHICAL_RING)
    peers, carriers = (num_nodes, smallest) if two_levels else (num_ranks, 1)
    spare = _spare(held, topology)
    if peers == 1:  # one node, whose ranks sum in their shared memory
        return ReductionNeeds(algorithm=runs, buckets=held, spare=spare)
    if two_levels:
        sent = far = between_nodes
    else:
        sent = around
        elsewhere = (num_ranks - smallest) / (num_ranks - 1)
        share = num_nodes / num_ranks if runs is Algorithm.RING else elsewhere
        far = int(around * share) if num_nodes > 1 else 0
    return ReductionNeeds(
        algorithm=runs, buckets=held, spare=spare,
        wire=_under_way(buckets, wire=wire, peers=peers, carriers=carriers),
        residuals=residuals // carriers if needs_feedback(wire) else 0, sent=sent, sent_between_nodes=far,
    )  # fmt: skip


def scatter_needs(
    buckets: Sequence[Bucket],
    *,
    keeps_gradients: bool,
    parameter_bytes: int,
    algorithm: str,
    wire: str,
    bucket_bytes: int,
    capabilities: Capabilities,
) -> ReductionNeeds:
    """Returns what a `ZeroUpdater` needs for `buckets`, without the memory for this rank's share of the sums.

    In the result, `buckets` is the memory in which gradients wait for their reduction.

    keeps_gradients: True if there is memory for all gradients (ZeRO-1); False if only for a few units (ZeRO-2).
    parameter_bytes: size of the parameters that are gathered, in bytes.
    algorithm: name of an algorithm, or `auto`.
    wire: a wire format that encodes every value.
    bucket_bytes: maximum size of a bucket's gradients, in bytes.
    """
    topology = capabilities.topology
    num_ranks = topology.num_ranks
    wanted = Algorithm.HIERARCHICAL if algorithm == AUTO else parse_algorithm(algorithm)
    runs = (
        wanted
        if wanted is Algorithm.DIRECT
        else choose_algorithm(
            Algorithm.HIERARCHICAL, wire=wire, capabilities=capabilities, sums_itself=True
        ).algorithm
    )
    two_levels = runs is Algorithm.HIERARCHICAL
    peers = topology.num_nodes if two_levels else num_ranks
    carriers = min(map(len, topology.ranks_by_node)) if two_levels else 1
    unit_bytes = bucket_bytes if keeps_gradients else -(-bucket_bytes // _UNITS_OF_A_BUCKET)
    units = [size for bucket in buckets for size in _unit_bytes(bucket, unit_bytes=unit_bytes)]
    # Beside the units the gradients of one bucket, until the last of them is there.
    filling = max((_gradient_bytes(bucket) for bucket in buckets), default=0)
    slots = units if keeps_gradients else heapq.nlargest(max(_SLOTS, 2 * _UNITS_OF_A_BUCKET), units)
    spare = _spare(sum(slots), topology)
    if peers == 1:
        return ReductionNeeds(algorithm=runs, buckets=sum(slots), spare=spare, wire=filling)
    codec = codec_named(wire)
    encoded = sum(codec.num_bytes(bucket.num_gradients, dtype=bucket.dtype) for bucket in buckets)
    whole = sum(map(_gradient_bytes, buckets))
    # Of each part one copy arrives from, and one is sent to, every other node; the node's sums are copies too.
    copies = encoded / whole + (1.0 if carriers > 1 else 0.0) + (encoded / whole if not codec.exact else 0.0)
    in_flight = sum(heapq.nlargest(_BUCKETS_IN_FLIGHT, units)) * (peers - 1) / num_ranks
    sent = (encoded + parameter_bytes) * (peers - 1) / num_ranks
    elsewhere = (num_ranks - num_ranks / topology.num_nodes) / (num_ranks - 1)
    return ReductionNeeds(
        algorithm=runs, buckets=sum(slots), spare=spare, wire=filling + int(copies * in_flight),
        residuals=int(_RESIDUALS * whole * peers / num_ranks) if needs_feedback(wire) else 0, sent=int(sent),
        sent_between_nodes=int(sent if two_levels else sent * elsewhere),
    )  # fmt: skip


def _spare(num_bytes: int, topology: Topology) -> int:
    shares = any(len(ranks) > 1 for ranks in topology.ranks_by_node)
    return capacity_of(num_bytes) - num_bytes if shares else 0


def _gradient_bytes(bucket: Bucket) -> int:
    """Returns the bytes of a bucket's gradients, without gap and flags."""
    return bucket.num_gradients * bucket.dtype.itemsize


def _unit_bytes(bucket: Bucket, *, unit_bytes: int) -> list[int]:
    """Returns the size of each unit of a bucket, in bytes; see `BucketDivision`."""
    num_units = max(1, -(-_gradient_bytes(bucket) // unit_bytes))
    return [-(-_gradient_bytes(bucket) // num_units)] * num_units


class Sent(NamedTuple):
    """Bytes that a rank sends, as the mean over the ranks.

    total: bytes sent to all ranks.
    between_nodes: bytes sent to ranks of other nodes.
    """

    total: float
    between_nodes: float

    def times(self, factor: float) -> Sent:
        return Sent(self.total * factor, self.between_nodes * factor)


def all_sent(*parts: Sent) -> Sent:
    """Returns the sum of `parts`."""
    return Sent(sum(part.total for part in parts), sum(part.between_nodes for part in parts))


def gathered_in_a_ring(num_bytes: float, *, ranks: Sequence[int], topology: Topology) -> Sent:
    """Returns the bytes that an all-gather or a reduce-scatter over `ranks` sends, computed for a ring.

    In a ring over the ranks in order, one rank of each node sends to another node.

    num_bytes: size of the whole tensor, of which each rank holds an equal part.
    """
    sent = num_bytes * (len(ranks) - 1) / len(ranks)
    num_nodes = len({topology.node_of(rank) for rank in ranks})
    return Sent(sent, sent * num_nodes / len(ranks) if num_nodes > 1 else 0.0)


def sharded_sum(
    num_bytes: int,
    *,
    algorithm: str,
    wire: str,
    within: Literal["world", "node"],
    topology: Topology,
    itemsize: int = 4,
) -> Sent:
    """Returns the bytes sent by a sum of gradients of which each rank keeps a part; see `reduce_gradients_by`.

    num_bytes: size of the gradients, in bytes.
    algorithm: `auto`, `direct` or `hierarchical`.
    wire: a wire format that encodes every value.
    within: `world`: all ranks together keep one copy of the sums, each rank a part. `node`: the ranks of each node
    together keep a copy of the sums, which are then added up over the nodes.
    itemsize: bytes of one gradient element, 4 or 8.
    """
    num_ranks, num_nodes = topology.num_ranks, topology.num_nodes
    encoded = num_bytes
    if wire != "fp32":
        dtype = torch.float64 if itemsize == 8 else torch.float32
        encoded = codec_named(wire).num_bytes(num_bytes // itemsize, dtype=dtype)
    of_node = num_ranks / num_nodes
    within_node = num_bytes * (of_node - 1) / of_node
    if within == "node":
        between = 2 * encoded / of_node * (num_nodes - 1) / num_nodes
        return Sent(within_node + between, between)
    if algorithm == Algorithm.HIERARCHICAL and 1 < num_nodes < num_ranks:
        between = encoded / of_node * (num_nodes - 1) / num_nodes
        return Sent(within_node + between, between)
    if algorithm == AUTO and wire == "fp32":
        return gathered_in_a_ring(num_bytes, ranks=range(num_ranks), topology=topology)
    return Sent(encoded * (num_ranks - 1) / num_ranks, encoded * (num_ranks - of_node) / num_ranks)


def _under_way(buckets: Sequence[Bucket], *, wire: str, peers: int, carriers: int) -> int:
    """Returns the largest memory that a `TransportReducer` needs for messages, in bytes.

    This is the memory for the chunks in flight of the largest buckets. A rank encodes a chunk for each other peer. From
    each other peer it receives that peer's values of this rank's slice, and later the sum of that peer's slice.

    peers: number of ranks that exchange a chunk, one per node in two levels.
    carriers: number of ranks of a node that share the chunks.
    """
    codec, found = codec_named(wire), []
    for bucket in buckets:
        num_chunks = max(1, -(-bucket.numel // _CHUNK_ELEMS))
        part = -(-bucket.numel // num_chunks) // carriers
        encoded = codec.num_bytes(part, dtype=bucket.dtype)
        summed = part * bucket.dtype.itemsize if carriers > 1 else 0
        found.append(min(num_chunks, _CHUNKS_IN_FLIGHT) * (summed + encoded * (3 * (peers - 1) + 1) // peers))
    return sum(heapq.nlargest(_BUCKETS_IN_FLIGHT, found))


def _bytes_of(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize
