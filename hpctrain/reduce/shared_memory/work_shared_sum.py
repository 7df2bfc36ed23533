"""A bucket's sum over the ranks of a node in shared memory, piece by piece, by the ranks that are idle.

A rank that has finished backward sums the pieces that all have filled so far, so little remains for the last one.
The result does not depend on which rank sums a piece: each piece is summed in the order of the ranks.

Ranks claim pieces through an atomic counter, which needs compiled code; with numpy each rank sums a fixed share of the
pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import final

import torch

from hpctrain.reduce.shared_memory.partition import ElemRange, cut
from hpctrain.reduce.shared_memory.shared_buckets import Flag, NodeMemory
from hpctrain.reduce.shared_memory.summation import Compiled, add, in_order

# Elements of a piece. The others wait at most for one piece of a rank, about 25 us.
PIECE_ELEMS = 1 << 15
_COUNTER_BYTES = 64  # a cache line


class SumStatus(Enum):
    """Result of one turn of a sum: blocked, made progress, or complete."""

    WAITS = 0
    PROGRESSED = 1
    ENDED = 2


# Indexed by the result of the compiled `take`.
_PROGRESS = (SumStatus.WAITS, SumStatus.PROGRESSED, SumStatus.ENDED)


def num_pieces_of(numel: int) -> int:
    return -(-numel // PIECE_ELEMS)


def tally_bytes(numel: int) -> int:
    """Returns the bytes of a bucket's shared tally: number of pieces claimed, and each piece's sum of squares."""
    return _COUNTER_BYTES + 8 * num_pieces_of(numel)


@final
class NodeSum:
    """Sum of one bucket, which is reduced repeatedly. All counts of pieces accumulate over the rounds, never reset.

    buckets: by local rank, each shape (numel,), in host memory. number: index of its flags in `memory`. tally: uint8,
    shape (tally_bytes(numel),), zeroed, the same memory on all of the node's ranks. num_gradients: number of elements
    that count in the norm, the first ones. compiled: None unless all of the node's ranks have it.
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
        self.factor = 1.0  # for the following sums; the same on all of the node's ranks
        self._local = local
        self._num_gradients = num_gradients
        self._num_pieces = len(self._squares)
        self._own = cut(ElemRange(0, self._num_pieces), num_parts=len(buckets))[local]
        self._next = self._own.begin
        self._before = 0  # pieces of completed rounds
        self._filled = 0
        self._summed = 0
        self._compiled = compiled

    def fill(self, num_elems: int) -> None:
        """Announces this rank's first `num_elems` elements: from now on any rank may overwrite them with the sum."""
        whole = num_elems >= len(self._parts[0])
        filled = self._before + (self._num_pieces if whole else num_elems // PIECE_ELEMS)
        if filled > self._filled:
            self._filled = filled
            if self._compiled is not None:
                self._compiled.fill(self._flags[self._local], filled)
            else:
                self._memory.raise_flag(Flag(self._is_filled.place, filled))

    def sum(self) -> SumStatus:
        """Sums available pieces, after this rank has filled all. Returns ENDED, once, when the bucket holds the sum."""
        progress = self._sum_own() if self._compiled is None else self._sum_any(self._compiled.take)
        if progress is SumStatus.ENDED:
            self._before += self._num_pieces
            self._next = self._own.begin
        return progress

    def _sum_any(self, take: Callable[..., int]) -> SumStatus:
        """Sums all unclaimed pieces that all ranks have filled."""
        return _PROGRESS[
            take(
                self._parts, self._flags, self._begun, self._squares,
                self._local, self._before, PIECE_ELEMS, self._num_gradients, self.factor,
            )
        ]  # fmt: skip

    def _sum_own(self) -> SumStatus:
        """Sums the next of this rank's pieces if all ranks have filled it."""
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
            return SumStatus.PROGRESSED
        summed = Flag(self._is_summed.place, self._before + self._num_pieces)
        if summed.value > self._summed:
            self._summed = summed.value
            memory.raise_flag(summed)
        return SumStatus.ENDED if memory.raised(summed, by=everyone) else SumStatus.WAITS

    def square(self) -> float:
        """Returns the sum of squares of the bucket's gradients after the last sum, equal on all of the node's ranks."""
        return in_order(self._squares.tolist())


def sum_into(values: torch.Tensor, buckets: Sequence[torch.Tensor]) -> None:
    """Writes the sum of at least two `buckets`, each shape (n,), in their order, to `values`, shape (n,)."""
    add([bucket.numpy() for bucket in buckets], into=[values.numpy()])
