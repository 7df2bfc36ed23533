"""The buckets of all ranks of a node in memory that they share, and the flags by which they wait for each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm.transport import Transport
from hpctrain.reduce.spans import Place

_ALIGNMENT = 64
# A cache line for each flag: ranks that look at one do not slow the writing of another.
_FLAG_BYTES = 64


@dataclass(frozen=True, slots=True)
class Flag:
    """A place in every rank's flags, and the value that says `here`."""

    place: int
    value: int


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@final
class NodeMemory:
    """Two flags and so many bytes for each bucket, on each rank of the node.

    A rank raises its own flags only, to the number of the round; so no flag need be taken down, and 64 bits last.
    Collective over the node; a rank alone on its node has memory of its own.
    """

    def __init__(self, transport: Transport, *, place: Place, sizes: Sequence[int]) -> None:
        self._transport = transport
        self._local = place.local
        self._alone = len(place.locals) == 1
        self._offsets = [2 * len(sizes) * _FLAG_BYTES]
        for size in sizes:
            self._offsets.append(self._offsets[-1] + _aligned(size))
        self._sizes = list(sizes)
        total = self._offsets[-1]
        self._memory = [torch.zeros(total, dtype=torch.uint8)] if self._alone else transport.share(total)
        self._flags: list[np.ndarray[Any, np.dtype[np.int64]]] = [
            memory[: 2 * len(sizes) * _FLAG_BYTES].numpy().view(np.int64) for memory in self._memory
        ]
        self._rounds = [0] * len(sizes)

    def segments(self, number: int) -> list[torch.Tensor]:
        """The bytes of bucket `number` of each rank of the node, by local rank."""
        begin = self._offsets[number]
        return [memory[begin : begin + self._sizes[number]] for memory in self._memory]

    def begin_round(self, number: int) -> tuple[Flag, Flag]:
        """The flags `my bucket is full` and `my part is summed` of the next reduction of a bucket."""
        self._rounds[number] += 1
        step = _FLAG_BYTES // 8
        return (
            Flag(place=2 * number * step, value=self._rounds[number]),
            Flag(place=(2 * number + 1) * step, value=self._rounds[number]),
        )

    def raise_flag(self, flag: Flag) -> None:
        """Say that what this rank wrote before is there to be read."""
        if not self._alone:
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
