"""The buckets of all ranks of a node in memory that they share, and the flags by which they wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm.interface.transport import Transport
from hpctrain.errors import BufferMismatch
from hpctrain.reduce.shared_memory.partition import TwoLevelPlace
from hpctrain.reduce.shared_memory.summation import Counts

_ALIGNMENT = 64
# A cache line for each flag: ranks that look at one do not slow the writing of another.
_FLAG_BYTES = 64
_FLAG_STEP = _FLAG_BYTES // 8  # from a flag to the next one, in numbers
_SPARE_BYTES = 1 << 16
# Numbers that ranks can add up beside the buckets, at a time.
MAX_NUMBERS = 255
# A flag, and two rows of a count and the numbers: a rank writes the next ones while others still read those before.
_ROW_NUMBERS = 1 + MAX_NUMBERS
_NUMBERS_BYTES = _FLAG_BYTES + 2 * 8 * _ROW_NUMBERS


@dataclass(frozen=True, slots=True)
class Flag:
    """A place in every rank's flags, and the value that says `here`."""

    place: int
    value: int


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@final
class NodeMemory:
    """Two flags and so many bytes for each bucket, on each rank of the node, and a place for a few numbers.

    A rank raises its own flags only, to the number of the round, or to a count over all rounds; so no flag need be
    taken down, and 64 bits last. A rank alone on its node has memory of its own.
    """

    def __init__(self, transport: Transport, *, place: TwoLevelPlace) -> None:
        self._transport = transport
        self._local = place.local
        self._ranks = place.locals
        self._alone = len(place.locals) == 1
        self._memory: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._offsets: list[int] = []
        self._flags: list[Counts] = []
        self._numbers: list[np.ndarray[Any, np.dtype[np.float64]]] = []
        self._rounds: list[int] = []
        self._round_of_numbers = 0

    def lay_out(self, sizes: Sequence[int]) -> bool:
        """Zeroed memory for buckets of so many bytes, the same on every rank; what was there before is gone.

        Collective over the node. True where memory that the ranks had was used again: then all ranks must meet
        before any of them uses it, as others' flags may still be those of before.
        """
        offsets = [_NUMBERS_BYTES + 2 * len(sizes) * _FLAG_BYTES]
        for size in sizes:
            offsets.append(offsets[-1] + _aligned(size))
        again = bool(self._memory) and self._memory[self._local].numel() >= offsets[-1]
        if again:
            self._memory[self._local].zero_()
        else:
            # Room for the same gradients in other buckets: more flags, more gaps.
            # MPI lays one rank's memory right behind another's, of whatever size it is.
            capacity = _aligned(offsets[-1] + offsets[-1] // 16 + _SPARE_BYTES)
            own = torch.zeros(capacity, dtype=torch.uint8) if self._alone else None
            self._memory = [own] if own is not None else self._transport.share(capacity)
        self._sizes, self._offsets = list(sizes), offsets
        heads = [memory[: offsets[0]].numpy() for memory in self._memory]
        self._flags = [head.view(np.int64) for head in heads]
        self._numbers = [
            head[_FLAG_BYTES:_NUMBERS_BYTES].view(np.float64).reshape(2, _ROW_NUMBERS) for head in heads
        ]
        self._rounds = [0] * len(sizes)
        self._round_of_numbers = 0
        return again

    def segments(self, number: int) -> list[torch.Tensor]:
        """The bytes of bucket `number` of each rank of the node, by local rank."""
        begin = self._offsets[number]
        return [memory[begin : begin + self._sizes[number]] for memory in self._memory]

    def begin_round(self, number: int) -> tuple[Flag, Flag]:
        """The flags `my bucket is full` and `my part is summed` of the next reduction of a bucket."""
        self._rounds[number] += 1
        full, summed = self.flags_of(number)
        return replace(full, value=self._rounds[number]), replace(summed, value=self._rounds[number])

    def flags_of(self, number: int) -> tuple[Flag, Flag]:
        """The two flags of a bucket as they are at the beginning."""
        first = _NUMBERS_BYTES // 8 + 2 * number * _FLAG_STEP
        return Flag(place=first, value=0), Flag(place=first + _FLAG_STEP, value=0)

    def counts_of(self, number: int) -> tuple[Counts, ...]:
        """Where the flags of a bucket are, by local rank: shape (16,), the first one at 0, the second at 8."""
        first = self.flags_of(number)[0].place
        return tuple(flags[first : first + 2 * _FLAG_STEP] for flags in self._flags)

    def lay_numbers(self, numbers: np.ndarray[Any, np.dtype[np.float64]]) -> Flag:
        """At most MAX_NUMBERS of them, for all to see; the flag `they are there`."""
        self._round_of_numbers += 1
        row = self._numbers[self._local][self._round_of_numbers % 2]
        row[0] = len(numbers)
        row[1 : 1 + len(numbers)] = numbers
        flag = Flag(place=0, value=self._round_of_numbers)
        self.raise_flag(flag)
        return flag

    def add_numbers(self, laid: Flag, numbers: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """`numbers` becomes the sum of what all have laid, in the order of the ranks; all must have raised the flag.

        BufferMismatch, on every rank alike, if it is not of as many numbers everywhere.
        """
        rows = [rows[laid.value % 2] for rows in self._numbers]
        counts = [int(row[0]) for row in rows]
        if len(set(counts)) > 1:
            told = ", ".join(f"rank {rank}: {n}" for rank, n in zip(self._ranks, counts, strict=True))
            raise BufferMismatch(
                f"ranks add up other counts of numbers ({told}): give each as many", agreed=True
            )
        numbers[:] = rows[0][1 : 1 + len(numbers)]
        for row in rows[1:]:
            numbers += row[1 : 1 + len(numbers)]

    def raise_flag(self, flag: Flag) -> None:
        """Say that what this rank wrote before is there to be read."""
        if self._alone:
            self._flags[0][flag.place] = flag.value
            return
        self._transport.fence()
        self._flags[self._local][flag.place] = flag.value
        self._transport.fence()

    def raised(self, flag: Flag, *, by: Iterable[int]) -> bool:
        """Whether all of these local ranks have raised it; then what they wrote before may be read."""
        if self._alone:
            return True
        if any(self._flags[local][flag.place] < flag.value for local in by):
            return False
        self._transport.fence()
        return True
