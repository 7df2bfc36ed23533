"""Sums by slices over any backend: all-to-all of encoded slices, sum in float32, all-gather. For any codec.

A rank owns one slice of every piece of a bucket. It encodes the other ranks' slices and an all-to-all sends
them to their owners; the owner sums them in rank order, encodes the sum once, and an all-gather distributes it.
Each value is rounded twice, whatever the number of ranks, and the backend only transports bytes: so bfloat16 and
int8 work over Horovod, which can sum neither. Thakur et al. 2005, section 4.5.

Error feedback is possible: a rank keeps the rounding errors of the slices that it sent, and in its own slice those of
the sum. Its own gradients in its own slice are not rounded, so one residual per element is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch

from hpctrain.comm import Collective, to_host
from hpctrain.reduce.codecs.codec import Codec
from hpctrain.reduce.codecs.error_feedback import Residuals
from hpctrain.reduce.collective_reducers.traffic_bounds import all_gather_bytes, successor_is_elsewhere
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology

# Maximum number of elements of a piece: limits the memory for encoded slices, and their number of bytes, which
# backends count in 32 bits.
PIECE_ELEMS = 2**26
ALIGNMENT = 8  # bytes, of every encoded slice; codecs require it


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """A run of a bucket's elements. Rank r owns those from offsets[r] to offsets[r + 1]."""

    offsets: tuple[int, ...]

    def numel(self, owner: int) -> int:
        return self.offsets[owner + 1] - self.offsets[owner]

    def slice(self, values: torch.Tensor, owner: int) -> torch.Tensor:
        return values[self.offsets[owner] : self.offsets[owner + 1]]

    def num_bytes(self, codec: Codec, *, dtype: torch.dtype) -> list[int]:
        """Returns the size of each owner's encoded slice, in bytes."""
        owners = range(len(self.offsets) - 1)
        return [codec.num_bytes(self.numel(owner), dtype=dtype) for owner in owners]


def pieces_of(numel: int, *, num_ranks: int, piece_elems: int = PIECE_ELEMS) -> list[BucketPiece]:
    """Splits a bucket into pieces of at most `piece_elems` elements; none for an empty bucket. Pure."""
    pieces = []
    for begin in range(0, numel, piece_elems):
        counts = split_evenly(min(piece_elems, numel - begin), num_parts=num_ranks)
        pieces.append(BucketPiece(tuple(accumulate(counts, initial=begin))))
    return pieces


def padded(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to a multiple of the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@final
class SliceSum:
    """`BucketSum` by slices over `comm`, with error feedback if `residuals` are given.

    Works in host memory: a CUDA bucket is copied there and back. `bytes_sent`: of the all-to-all, those to ranks of
    other nodes; of the all-gather, computed for a ring.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        codec: Codec,
        topology: Topology,
        residuals: Residuals | None = None,
        piece_elems: int = PIECE_ELEMS,
    ) -> None:
        self._comm = comm
        self._codec = codec
        self._residuals = residuals
        self._piece_elems = piece_elems
        node = topology.node_of(comm.rank)
        self._elsewhere = [topology.node_of(rank) != node for rank in range(comm.num_ranks)]
        self._next_elsewhere = successor_is_elsewhere(comm.rank, num_ranks=comm.num_ranks, topology=topology)
        self._buckets: Sequence[Bucket] = ()
        self.bytes_sent = 0

    @property
    def wire(self) -> str:
        return self._codec.name

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> None:
        self._buckets = buckets
        if self._residuals is not None:
            self._residuals.plan(buckets, device=torch.device("cpu"))

    def start(self, number: int, memory: torch.Tensor) -> Callable[[], None]:
        """Calls `sum`, which needs several dependent operations: collective and blocking. See `BucketSum.start`."""
        self.sum(number, memory)
        return lambda: None

    def sum(self, number: int, memory: torch.Tensor) -> None:
        """Sums `memory` over all ranks, in place. Collective: two blocking operations per piece."""
        bucket = self._buckets[number]
        host = to_host(memory)
        lost = None
        if self._residuals is not None:
            self._residuals.add_to(host, bucket)
            lost = torch.empty_like(host)
        for piece in pieces_of(bucket.numel, num_ranks=self._comm.num_ranks, piece_elems=self._piece_elems):
            self._sum_piece(piece, host, lost=lost)
        if host is not memory:
            memory.copy_(host)
        if self._residuals is not None and lost is not None:
            for slot in bucket.slots:
                self._residuals.left(slot).copy_(lost[slot.offset : slot.offset + slot.numel])

    def _sum_piece(self, piece: BucketPiece, values: torch.Tensor, *, lost: torch.Tensor | None) -> None:
        mine, num_ranks = self._comm.rank, self._comm.num_ranks
        sizes = piece.num_bytes(self._codec, dtype=values.dtype)
        padded_sizes = [padded(size) for size in sizes]
        to_owners = [0 if owner == mine else part for owner, part in enumerate(padded_sizes)]
        leaving = torch.zeros(sum(to_owners), dtype=torch.uint8)
        for owner, part in enumerate(leaving.split(to_owners)):
            if owner != mine:
                self._encode(piece, owner, values, out=part[: sizes[owner]], lost=lost)
        arrived = self._comm.all_to_all(
            leaving,
            send_counts=to_owners,
            receive_counts=[0 if rank == mine else padded_sizes[mine] for rank in range(num_ranks)],
        )
        self.bytes_sent += sum(n for n, far in zip(to_owners, self._elsewhere, strict=True) if far)
        others = [part[: sizes[mine]] for part in arrived.view(num_ranks - 1, padded_sizes[mine])]
        own = piece.slice(values, mine)
        if own.numel():
            _sum_in_order(own, before=others[:mine], after=others[mine:], codec=self._codec)
        packet = torch.zeros(padded_sizes[mine], dtype=torch.uint8)
        self._encode(piece, mine, values, out=packet[: sizes[mine]], lost=lost)
        whole = self._comm.all_gather(packet, counts=padded_sizes)
        if self._next_elsewhere:
            self.bytes_sent += all_gather_bytes(padded_sizes, rank=mine)
        for owner, part in enumerate(whole.split(padded_sizes)):
            self._codec.decode(part[: sizes[owner]], out=piece.slice(values, owner))

    def _encode(
        self,
        piece: BucketPiece,
        owner: int,
        values: torch.Tensor,
        *,
        out: torch.Tensor,
        lost: torch.Tensor | None,
    ) -> None:
        """Encodes the owner's slice of `values` into `out`, and writes the error into its slice of `lost`."""
        own = piece.slice(values, owner)
        self._codec.encode(own, out=out)
        if lost is not None:
            missing = piece.slice(lost, owner)
            self._codec.decode(out, out=missing)
            torch.sub(own, missing, out=missing)


def _sum_in_order(
    own: torch.Tensor, *, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], codec: Codec
) -> None:
    """Sums into `own`, in rank order, the encoded slices of the ranks before and after this one."""
    if before:
        total = torch.empty_like(own)
        codec.decode(before[0], out=total)
        for data in before[1:]:
            codec.add(data, out=total)
        own.add_(total)  # float addition commutes: (sum of earlier ranks) + own
    for data in after:
        codec.add(data, out=own)
