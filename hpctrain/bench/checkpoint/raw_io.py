"""Plain writes and reads of a state's bytes: the baseline for a checkpoint's speed.

Every rank writes its part of the bytes into one file with as few calls as possible and flushes it to disk.
There are no metadata, hashes or renames, and no rank waits for another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint import Replicated, State

# Linux's limits for one call.
IOV_MAX = 1024
CALL_BYTES = 1 << 30
# Parts of neighbouring ranks meet at a multiple of this, so that no page is written by two ranks.
CUT_BYTES = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchState:
    """A replicated state of random bytes, the same on every rank. tensors: float32, one-dimensional, of equal size up
    to one element; each has separate memory, all of it touched."""

    tensors: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def state(self) -> State:
        items = [
            Replicated(name=f"layer.{number:06d}.weight", tensor=tensor)
            for number, tensor in enumerate(self.tensors)
        ]
        return State(items=items, document={"step": 1, "made for": "hpctrain bench checkpoint"})

    def views(self) -> list[NDArray[np.uint8]]:
        """The tensors' bytes in order: uint8, shape (bytes,) each, sharing the tensors' memory."""
        return [np.asarray(tensor.view(torch.uint8).numpy()) for tensor in self.tensors]


def make_state(*, num_bytes: int, num_tensors: int, seed: int = 0) -> BenchState:
    """Makes a random state. num_bytes: rounded down to whole elements, at least one per tensor."""
    generator = torch.Generator().manual_seed(seed)
    elements = max(num_tensors, num_bytes // 4)
    cuts = [elements * number // num_tensors for number in range(num_tensors + 1)]
    tensors = []
    for begin, end in pairwise(cuts):
        bits = torch.empty(end - begin, dtype=torch.int32).random_(generator=generator)
        tensors.append(bits.view(torch.float32))
    return BenchState(tensors=tuple(tensors))


@final
class RawShare:
    """One rank's part of a file that holds the state's tensors one after another.

    begin, end: byte range of the file. `write` and `read` are not collective.
    """

    def __init__(self, state: BenchState, *, rank: int, num_ranks: int) -> None:
        total = state.num_bytes
        self._state = state
        self.begin, self.end = (
            total if place == num_ranks else total * place // num_ranks // CUT_BYTES * CUT_BYTES
            for place in (rank, rank + 1)
        )
        self._pieces = list(_between(state.views(), self.begin, self.end))
        self._copy = np.empty(0, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def create(self, path: Path) -> None:
        """Creates the empty file. One rank calls it; the others must wait for it. Raises OSError."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def write(self, path: Path) -> None:
        """Writes this rank's part and flushes it to disk. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            offset = self.begin
            for call in _calls(self._pieces):
                size = sum(piece.nbytes for piece in call)
                written = os.pwritev(descriptor, [piece.data for piece in call], offset)
                if written != size:
                    raise OSError(f"{written} of {size} bytes were written to {path}")
                offset += size
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: Path) -> list[NDArray[np.uint8]]:
        """Reads the whole state into fresh memory. Returns one uint8 array per tensor. Raises OSError."""
        arrays: list[NDArray[np.uint8]] = [
            np.empty(tensor.nbytes, dtype=np.uint8) for tensor in self._state.tensors
        ]
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset = 0
            for call in _calls(arrays):
                size = sum(array.nbytes for array in call)
                if (found := os.preadv(descriptor, [array.data for array in call], offset)) != size:
                    raise OSError(f"{found} of {size} bytes were read from {path}")
                offset += size
        finally:
            os.close(descriptor)
        return arrays

    def prepare_copy(self) -> None:
        """Allocates the memory that `copy` copies into and touches every page of it."""
        self._copy = np.empty(self.num_bytes, dtype=np.uint8)
        self._copy.fill(1)

    def copy(self) -> None:
        """Copies this rank's part into the memory of `prepare_copy`."""
        offset = 0
        for piece in self._pieces:
            self._copy[offset : offset + piece.nbytes] = piece
            offset += piece.nbytes


def _between(views: Sequence[NDArray[np.uint8]], begin: int, end: int) -> Iterator[NDArray[np.uint8]]:
    start = 0
    for view in views:
        piece = view[max(0, begin - start) : max(0, end - start)]
        if piece.nbytes:
            yield piece
        start += view.nbytes


def _calls(arrays: Sequence[NDArray[np.uint8]]) -> Iterator[list[NDArray[np.uint8]]]:
    """Yields the arrays of each call, in order, as many as the kernel accepts; larger arrays are split."""
    call: list[NDArray[np.uint8]] = []
    size = 0
    for array in arrays:
        for start in range(0, array.nbytes, CALL_BYTES):
            part = array[start : start + CALL_BYTES]
            if call and (len(call) == IOV_MAX or size + part.nbytes > CALL_BYTES):
                yield call
                call, size = [], 0
            call.append(part)
            size += part.nbytes
    if call:
        yield call
