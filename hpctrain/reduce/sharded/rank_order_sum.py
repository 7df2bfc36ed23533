"""Sums over the ranks of a communicator, in their order, of values that travel encoded.

Every rank sends the owner of a slice its values of that slice, and the owner adds them up in the order of the ranks:
the sum does not depend on which message arrives first, and each value is rounded once. Thakur et al. 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch

from hpctrain.comm import Collective
from hpctrain.reduce.codecs.codec import Codec
from hpctrain.storage import split_evenly

_ALIGNMENT = 8  # bytes, of every encoded slice; codecs require it


@final
class RankOrderSum:
    """Reduce-scatter and all-reduce over `comm`, which no other object may use.

    Values are contiguous float32 or float64 in host memory, and are summed in their dtype. A rank's own values of its
    own slice are not encoded. codec: of what is sent; no error feedback.
    """

    def __init__(self, comm: Collective, *, codec: Codec) -> None:
        self._comm = comm
        self._codec = codec

    def reduce_scatter(self, values: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor) -> None:
        """Writes the sum of this rank's slice of `values`, shape (sum(counts),), into `out`, shape (counts[rank],).

        Collective. counts: the same on every rank; an entry may be 0. Bytes sent: of all other slices, encoded.
        """
        mine, num_ranks = self._comm.rank, self._comm.num_ranks
        sizes = [self._codec.num_bytes(count, dtype=values.dtype) for count in counts]
        room = [0 if owner == mine else _aligned(size) for owner, size in enumerate(sizes)]
        leaving = torch.zeros(sum(room), dtype=torch.uint8)
        slices = values.split(list(counts))
        for owner, packet in enumerate(leaving.split(room)):
            if owner != mine:
                self._codec.encode(slices[owner], out=packet[: sizes[owner]])
        received = [0 if rank == mine else _aligned(sizes[mine]) for rank in range(num_ranks)]
        arrived = self._comm.all_to_all(leaving, send_counts=room, receive_counts=received).split(received)
        for rank in range(num_ranks):
            packet = arrived[rank][: sizes[mine]]
            if rank == 0:
                out.copy_(slices[0]) if mine == 0 else self._codec.decode(packet, out=out)
            elif rank == mine:
                out.add_(slices[mine])
            else:
                self._codec.add(packet, out=out)

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sums `values`, shape (n,), over the ranks in place: the same bits on every rank. Collective.

        Each rank sums a slice, and the sums travel encoded too: with N ranks each sends 2 (N-1)/N of the values.
        """
        counts = split_evenly(values.numel(), num_parts=self._comm.num_ranks)
        part = torch.empty(counts[self._comm.rank], dtype=values.dtype)
        self.reduce_scatter(values, counts=counts, out=part)
        sizes = [self._codec.num_bytes(count, dtype=values.dtype) for count in counts]
        room = [_aligned(size) for size in sizes]
        packet = torch.zeros(room[self._comm.rank], dtype=torch.uint8)
        self._codec.encode(part, out=packet[: sizes[self._comm.rank]])
        whole = self._comm.all_gather(packet, counts=room)
        firsts = accumulate(room, initial=0)
        for first, size, own in zip(firsts, sizes, values.split(counts), strict=False):
            self._codec.decode(whole[first : first + size], out=own)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
