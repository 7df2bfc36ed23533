"""Division of the replicated tensors' bytes into one part of equal size per rank. Pure.

A part is computed from its number alone, so that a rank of ten thousand plans its own part and no other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

# Parts are divided inside a tensor only at multiples of this. Large datasets begin at a page, and a page written by two
# nodes is slow or even corrupted on network filesystems. A multiple of every element size.
CUT_BYTES = 4096


class Division:
    """The concatenation of tensors, divided into `num_parts` parts.

    If `ahead_bytes` is at most an equal share, every part's size differs from that by less than CUT_BYTES.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], *, num_parts: int, ahead_bytes: int = 0) -> None:
        """sizes: (bytes, bytes per element) of each tensor. ahead_bytes: other bytes that the writer of part 0 writes;
        this part is smaller by them, and may be empty."""
        self._elem_bytes = [elem_bytes for _, elem_bytes in sizes]
        self._begins = list(accumulate((num_bytes for num_bytes, _ in sizes), initial=0))
        self._num_parts = num_parts
        total_bytes = self._begins[-1]
        self._first_bytes = max(0, (total_bytes + ahead_bytes) // num_parts - ahead_bytes)
        self._rest_bytes = total_bytes - self._first_bytes

    def pieces(self, part: int) -> Iterator[tuple[int, int, int]]:
        """Yields (tensor, start, stop): the part holds elements start <= i < stop of the flattened tensor."""
        return self._pieces_between(self._boundary(part), self._boundary(part + 1))

    def pieces_of_run(self, run: int, *, ends: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Yields the same for a run of successive parts. ends: `boundaries` of all runs' ends, shape (num_runs,)."""
        return self._pieces_between(int(ends[run - 1]) if run else 0, int(ends[run]))

    def number_of_run(self, run: int, tensor: int, *, ends: NDArray[np.int64]) -> int:
        """Returns how many runs before this one have elements of a tensor of which it has some."""
        first, begin = self._begins[tensor], int(ends[run - 1]) if run else 0
        if begin <= first:
            return 0
        inside = ends[np.searchsorted(ends, first, side="right") : np.searchsorted(ends, begin, side="right")]
        return len(np.unique(inside))

    def _pieces_between(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        tensor = bisect_right(self._begins, begin) - 1
        while begin < end:
            base, elem_bytes = self._begins[tensor], self._elem_bytes[tensor]
            stop = min(end, self._begins[tensor + 1])
            if stop > begin:
                yield tensor, (begin - base) // elem_bytes, (stop - base) // elem_bytes
            begin, tensor = stop, tensor + 1

    def _boundary(self, part: int) -> int:
        """Returns the position in the concatenation at which a part begins, in bytes."""
        if part == 0:
            return 0
        if part == self._num_parts:
            return self._begins[-1]
        cut = self._first_bytes + (part - 1) * self._rest_bytes // (self._num_parts - 1)
        return cut - (cut - self._begins[bisect_right(self._begins, cut) - 1]) % CUT_BYTES

    def boundaries(self, parts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions in the concatenation at which these parts begin, in bytes; shape and dtype as `parts`,
        where num_parts stands for the end."""
        if self._num_parts == 1:
            return np.where(parts == 0, 0, self._begins[-1])
        begins = np.array(self._begins, dtype=np.int64)
        # The product of part and bytes may exceed 64 bits, those of quotient and remainder do not.
        whole, rest = divmod(self._rest_bytes, self._num_parts - 1)
        cuts = self._first_bytes + (parts - 1) * whole + (parts - 1) * rest // (self._num_parts - 1)
        cuts[parts == 0], cuts[parts == self._num_parts] = 0, self._begins[-1]
        return cuts - (cuts - begins[np.searchsorted(begins, cuts, side="right") - 1]) % CUT_BYTES
