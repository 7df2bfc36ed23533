"""What a rank needs to reduce the gradients of a step: memory and traffic, by formulas. Pure.

E: bytes of the buckets; w: the wire's share of them; N ranks on C nodes, R on the smallest.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpctrain.reduce.algorithms import LIBRARY_ALGORITHMS, Algorithm, Means, decide
from hpctrain.reduce.codecs.registry import codec_named
from hpctrain.reduce.collective_reducers.cast_sum import wire_dtype
from hpctrain.reduce.collective_reducers.power_sgd import FACTOR_COLUMNS
from hpctrain.reduce.collective_reducers.power_sgd_factors import FactoredBucket
from hpctrain.reduce.collective_reducers.top_k import FRACTION, TopKMessage
from hpctrain.reduce.contract.bucket_plan import Bucket

# Of the engine and the updater: elements of a chunk, chunks of a bucket and buckets in flight.
_CHUNK_ELEMS = 1 << 19
_CHUNKS_IN_FLIGHT = 4
_BUCKETS_IN_FLIGHT = 4
# A rank keeps the residual at the start of a step and the new one.
_RESIDUALS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionNeeds:
    """Bytes of a rank. algorithm: the one that runs.

    buckets: the gradients, with gaps and flags. wire: copies in the wire format and messages under way, at most.
    residuals: of error feedback. sent: in messages to other ranks in a step, the mean of the ranks; what ranks of a
    node read from each other's memory is not sent. sent_between_nodes: of it, to other nodes.
    """

    algorithm: Algorithm
    buckets: int
    wire: int = 0
    residuals: int = 0
    sent: int = 0
    sent_between_nodes: int = 0


def reduction_needs(
    buckets: Sequence[Bucket], *, algorithm: Algorithm, wire: str, means: Means
) -> ReductionNeeds:
    """Returns what `algorithm`, or what runs instead of it, needs for `buckets`.

    wire: a wire format other than `auto`. Of top-k and low-rank, which send everything in their first steps, the later
    steps count.
    """
    runs = decide(algorithm, wire=wire, means=means).algorithm
    held = sum(_bytes_of(bucket) for bucket in buckets)
    num_ranks, num_nodes = means.topology.num_ranks, means.topology.num_nodes
    if num_ranks == 1:
        return ReductionNeeds(algorithm=runs, buckets=held)
    # In a ring over the ranks in order, one rank of each node sends to another node.
    ring_share = num_nodes / num_ranks if num_nodes > 1 else 0.0
    residuals = _RESIDUALS * sum(
        slot.numel * bucket.dtype.itemsize for bucket in buckets for slot in bucket.slots
    )
    if wire == "top-k":
        message = sum(
            TopKMessage.of(bucket, fraction=FRACTION, value_dtype=None).num_bytes for bucket in buckets
        )
        sent = message * (num_ranks - 1)
        return ReductionNeeds(
            algorithm=runs, buckets=held, wire=message, residuals=residuals, sent=sent,
            sent_between_nodes=int(sent * ring_share),
        )  # fmt: skip
    if wire == "low-rank":
        factors = [
            FactoredBucket(bucket, rank=FACTOR_COLUMNS, device=torch.device("meta")) for bucket in buckets
        ]
        messages = sum(f.first.nbytes + f.second.nbytes for f in factors)
        plain = sum(_bytes_of(f.bucket) for f in factors if not f.matrices)
        sent = 2 * (messages + plain) * (num_ranks - 1) // num_ranks
        return ReductionNeeds(
            algorithm=runs, buckets=held, residuals=residuals, sent=sent,
            # The factors are kept for the next step besides.
            wire=messages + sum(f.second.nbytes for f in factors), sent_between_nodes=int(sent * ring_share),
        )  # fmt: skip
    return _of_every_value(buckets, runs, wire=wire, means=means, held=held, residuals=residuals)


def _of_every_value(
    buckets: Sequence[Bucket], runs: Algorithm, *, wire: str, means: Means, held: int, residuals: int
) -> ReductionNeeds:
    """Wire formats that send every value."""
    topology = means.topology
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
    if peers == 1:  # one node, whose ranks sum in their shared memory
        return ReductionNeeds(algorithm=runs, buckets=held)
    if two_levels:
        sent = far = between_nodes
    else:
        sent = around
        elsewhere = (num_ranks - smallest) / (num_ranks - 1)
        share = num_nodes / num_ranks if runs is Algorithm.RING else elsewhere
        far = int(around * share) if num_nodes > 1 else 0
    return ReductionNeeds(
        algorithm=runs, buckets=held, wire=_under_way(buckets, wire=wire, peers=peers, carriers=carriers),
        residuals=residuals // carriers if wire == "int8" else 0, sent=sent, sent_between_nodes=far,
    )  # fmt: skip


def _under_way(buckets: Sequence[Bucket], *, wire: str, peers: int, carriers: int) -> int:
    """Returns the bytes of the engine's messages at most: those of the chunks in flight of the largest buckets.

    A chunk is encoded for all peers but one, and arrives twice from them: as their parts of the own slice, and as the
    sums of theirs.
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
