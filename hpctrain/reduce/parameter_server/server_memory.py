"""The layout of a server's memory, in which ranks read parameters and leave gradients. Pure.

Each server holds one share of the parameters. Its memory contains, one after another:

- words of 8 bytes: the counter of parts (used on the first server only), the number of the version that the server is
  writing, the newest complete version, and for each worker the number of messages that the server has taken;
- two copies of the share, in which the versions are written alternately. A copy begins with a stamp: its version, and
  for each worker how many parts of the common order are behind the newest one of that worker in this version;
- for each worker a slot: the number of messages that the worker has left there, and the newest message: the part of the
  common order, whether its gradients are finite, which parameters have a gradient, and the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

WORD_BYTES = 8
_LINE_BYTES = 64

# Offsets of the words that every server has.
COUNTER = 0
BEGUN = 1 * WORD_BYTES
PUBLISHED = 2 * WORD_BYTES
_TAKEN = 3 * WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The elements of one bucket that a server holds."""

    dtype: torch.dtype
    numel: int

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ShareBytes:
    """The elements of all shares of a server as one run of bytes, after `head` bytes for other values."""

    head: int
    shares: tuple[Share, ...]

    @property
    def num_bytes(self) -> int:
        return self._offsets()[-1]

    def views(self, memory: NDArray[np.uint8]) -> list[torch.Tensor]:
        """Returns the elements of each share as a tensor, shape (share.numel,), that shares `memory`."""
        found = []
        for offset, share in zip(self._offsets(), self.shares, strict=False):
            part = torch.from_numpy(memory[offset : offset + share.num_bytes])
            found.append(part.view(share.dtype) if share.numel else torch.empty(0, dtype=share.dtype))
        return found

    def _offsets(self) -> list[int]:
        sizes = (_padded(share.num_bytes) for share in self.shares)
        return list(accumulate(sizes, initial=_padded(self.head)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """The layout of the memory of one server.

    Attributes:
        shares: For each bucket, the elements that the server holds.
        num_workers: Number of ranks that train.
        num_parameters: Number of trained parameters of the model.
    """

    shares: tuple[Share, ...]
    num_workers: int
    num_parameters: int

    @property
    def copy(self) -> ShareBytes:
        """A copy of the share: the stamp, then the parameters."""
        return ShareBytes((1 + self.num_workers) * WORD_BYTES, self.shares)

    @property
    def message(self) -> ShareBytes:
        """A message: the part, whether the gradients are finite, one byte per parameter, then the gradients."""
        return ShareBytes(2 * WORD_BYTES + self.num_parameters, self.shares)

    def taken(self, worker: int) -> int:
        """Returns the offset of the number of messages that the server has taken from a worker."""
        return _TAKEN + worker * WORD_BYTES

    def copy_at(self, version: int) -> int:
        """Returns the offset of the copy in which a version is written."""
        return _padded(self.taken(self.num_workers)) + version % 2 * self.copy.num_bytes

    def left_at(self, worker: int) -> int:
        """Returns the offset of the number of messages that a worker has left."""
        return self.copy_at(0) + 2 * self.copy.num_bytes + worker * (_LINE_BYTES + self.message.num_bytes)

    def message_at(self, worker: int) -> int:
        """Returns the offset of a worker's newest message."""
        return self.left_at(worker) + _LINE_BYTES

    @property
    def num_bytes(self) -> int:
        return self.left_at(self.num_workers)


def words_of(memory: NDArray[np.uint8], *, count: int) -> NDArray[np.int64]:
    """Returns the first `count` words of `memory` as integers that share the memory."""
    return memory[: count * WORD_BYTES].view(np.int64)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


def flags_of(message: NDArray[np.uint8], *, num_parameters: int) -> NDArray[np.uint8]:
    """Returns the bytes of a message that say which parameters have a gradient, shape (num_parameters,)."""
    return message[2 * WORD_BYTES : 2 * WORD_BYTES + num_parameters]


def shares_of_servers(
    shares: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]
) -> list[tuple[Share, ...]]:
    """Returns the shares of each server.

    shares: for each bucket, the number of elements of each server. dtypes: the dtype of each bucket.
    """
    by_server = zip(*shares, strict=True)
    return [
        tuple(Share(dtype=dtype, numel=numel) for dtype, numel in zip(dtypes, of_server, strict=True))
        for of_server in by_server
    ]
