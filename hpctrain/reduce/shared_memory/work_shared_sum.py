"""A bucket's sum over the ranks of a node, in memory that they share: piece by piece, by whoever has time.

A rank that is done with backward sums what the others have filled so far, and the last one finds little left to do.
Which rank sums a piece makes no difference to the bits: each piece is summed in the order of the ranks.

Who sums the next piece is settled by an atomic counter, which compiled code has and numpy has not: without it each
rank sums pieces that are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import final

import torch

from hpctrain.reduce.shared_memory.partition import ElemRange, cut
from hpctrain.reduce.shared_memory.shared_buckets import Flag, NodeMemory
from hpctrain.reduce.shared_memory.summation import Compiled, add, in_order

# What a rank that is in the middle of a piece keeps the others waiting for: some 25 us.
PIECE_ELEMS = 1 << 15
_COUNTER_BYTES = 64  # a cache line


class SumStatus(Enum):
    """What a look at a sum found."""

    WAITS = 0
    GOT_ON = 1
    ENDED = 2


# By what the compiled sum returns.
_PROGRESS = (SumStatus.WAITS, SumStatus.GOT_ON, SumStatus.ENDED)


def num_pieces_of(numel: int) -> int:
    return -(-numel // PIECE_ELEMS)


def tally_bytes(numel: int) -> int:
    """What the ranks of a node note together of a bucket: how many pieces were begun, and each piece's square."""
    return _COUNTER_BYTES + 8 * num_pieces_of(numel)


@final
class NodeSum:
    """One bucket, reduced again and again. All counts of pieces are of all its rounds, so none is ever set back.

    buckets: by local rank, each of shape (numel,), in host memory. number: of its flags in `memory`. tally: shape
    (tally_bytes(numel),), zeroed, the same memory on all of the node's ranks. num_gradients: of a bucket's elements
    those that count in the norm, the first ones. compiled: None unless all of the node's ranks have it.
    """

    def __init__(
        self,
        buckets: Sequence[torch.Tensor],
        *,
        memory: NodeMemory,
        number: int,
        tally: torch.Tensor,
        local: int,
        num_gradients: int,
        compiled: Compiled | None,
    ) -> None:
        self._parts = tuple(bucket.numpy() for bucket in buckets)
        self._memory = memory
        self._flags = memory.counts_of(number)
        self._is_filled, self._is_summed = memory.flags_of(number)
        self._begun = tally[:8].view(torch.int64).numpy()
        self._squares = tally[_COUNTER_BYTES:].view(torch.float64).numpy()
        self.factor = 1.0  # of the sums from now on; the same on all of the node's ranks
        self._local = local
        self._num_gradients = num_gradients
        self._num_pieces = len(self._squares)
        self._own = cut(ElemRange(0, self._num_pieces), num_parts=len(buckets))[local]
        self._next = self._own.begin
        self._before = 0  # pieces of the rounds that have ended
        self._filled = 0
        self._summed = 0
        self._compiled = compiled

    def fill(self, num_elems: int) -> None:
        """This rank's first `num_elems` elements are there: from now on they may become the sum at any time."""
        whole = num_elems >= len(self._parts[0])
        filled = self._before + (self._num_pieces if whole else num_elems // PIECE_ELEMS)
        if filled > self._filled:
            self._filled = filled
            if self._compiled is not None:
                self._compiled.fill(self._flags[self._local], filled)
            else:
                self._memory.raise_flag(Flag(self._is_filled.place, filled))

    def sum(self) -> SumStatus:
        """Sum what can be summed, after this rank has filled all; ENDED, once, when the bucket holds the sum."""
        progress = self._sum_own() if self._compiled is None else self._sum_any(self._compiled.take)
        if progress is SumStatus.ENDED:
            self._before += self._num_pieces
            self._next = self._own.begin
        return progress

    def _sum_any(self, take: Callable[..., int]) -> SumStatus:
        """The next pieces of the bucket, as far as all have filled them."""
        return _PROGRESS[
            take(
                self._parts, self._flags, self._begun, self._squares,
                self._local, self._before, PIECE_ELEMS, self._num_gradients, self.factor,
            )
        ]  # fmt: skip

    def _sum_own(self) -> SumStatus:
        """The next one of this rank's pieces, if all have filled it."""
        memory, everyone = self._memory, range(len(self._parts))
        if self._next < self._own.end:
            if not memory.raised(Flag(self._is_filled.place, self._before + self._next + 1), by=everyone):
                return SumStatus.WAITS
            begin = self._next * PIECE_ELEMS
            parts = [part[begin : begin + PIECE_ELEMS] for part in self._parts]
            into = parts if len(parts) > 1 or self.factor != 1 else ()
            self._squares[self._next] = add(
                parts, into=into, num_squared=self._num_gradients - begin, factor=self.factor
            )
            self._next += 1
            return SumStatus.GOT_ON
        summed = Flag(self._is_summed.place, self._before + self._num_pieces)
        if summed.value > self._summed:
            self._summed = summed.value
            memory.raise_flag(summed)
        return SumStatus.ENDED if memory.raised(summed, by=everyone) else SumStatus.WAITS

    def square(self) -> float:
        """Sum of the squares of the bucket's gradients after the last sum, the same on all of the node's ranks."""
        return in_order(self._squares.tolist())


def sum_into(values: torch.Tensor, buckets: Sequence[torch.Tensor]) -> None:
    """values = the sum of at least two buckets' parts, in the order of the ranks."""
    add([bucket.numpy() for bucket in buckets], into=[values.numpy()])
