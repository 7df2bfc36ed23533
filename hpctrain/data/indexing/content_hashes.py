"""Reads indexed datasets once, and computes the hashes of their blocks and the statistics of their elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data.format.manifest_entries import Moments, moments_of
from hpctrain.data.indexing.inspect_file import FoundDataset, open_to_index, read_blocks
from hpctrain.errors import DataError

if TYPE_CHECKING:
    import h5py


@dataclass(frozen=True, kw_only=True)
class HashedContent:
    """Hashes of the blocks of an HDF5 dataset; mean, variance and extremes (`moments`) of its values.

    The elements are hashed as little-endian row-major bytes. A dataset of variable lengths has no hashes.
    """

    hashes: tuple[str, ...]
    moments: Moments

    def as_json(self) -> dict[str, Any]:
        return {"hashes": list(self.hashes), "moments": self.moments.as_json()}

    @classmethod
    def of_json(cls, document: dict[str, Any]) -> HashedContent:
        return cls(hashes=tuple(document["hashes"]), moments=Moments(**document["moments"]))


class _BlockHashes:
    """Computes the xxh3_64 hash of each block of `block_bytes` bytes of a byte stream.

    The stream is passed in pieces of any size.
    """

    def __init__(self, *, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._digest = xxhash.xxh3_64()
        self._filled = 0
        self._hashes: list[str] = []

    def update(self, data: memoryview) -> None:
        while len(data):
            part = data[: self._block_bytes - self._filled]
            self._digest.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == self._block_bytes:
                self._close_block()

    def finish(self) -> tuple[str, ...]:
        if self._filled:
            self._close_block()
        return tuple(self._hashes)

    def _close_block(self) -> None:
        self._hashes.append(self._digest.hexdigest())
        self._digest.reset()
        self._filled = 0


def read_content(
    path: str,
    *,
    found: Sequence[FoundDataset],
    block_bytes: int,
    hashed_bytes: int | None = None,
    meant: Sequence[Callable[[NDArray[Any]], NDArray[Any]]],
) -> tuple[HashedContent, ...]:
    """Reads numeric datasets of one file, each once. Returns hashes and statistics of each dataset.

    `found` are the datasets. There is one hash per block of `block_bytes` bytes. Only the first `hashed_bytes` bytes of
    a dataset are hashed; None: all bytes. `meant` contains one function per dataset. Each function takes stored values,
    and returns the values of which mean, variance and extremes are computed. Raises DataError if the file cannot be
    read.
    """
    contents = []
    with open_to_index(path) as file:
        for one, values_of in zip(found, meant, strict=True):
            limit = one.num_bytes if hashed_bytes is None else hashed_bytes
            try:
                contents.append(
                    _content(
                        file[one.dataset], one, block_bytes=block_bytes, limit=limit, values_of=values_of
                    )
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise DataError(f"{one.dataset} of {path} cannot be read: {error}") from error
    return tuple(contents)


def _content(
    dataset: h5py.Dataset,
    found: FoundDataset,
    *,
    block_bytes: int,
    limit: int,
    values_of: Callable[[NDArray[Any]], NDArray[Any]],
) -> HashedContent:
    hashes = _BlockHashes(block_bytes=block_bytes)
    moments = Moments()
    row_bytes = found.num_bytes // max(1, found.shape[0]) if found.shape else found.num_bytes
    left = limit
    for block in read_blocks(dataset, found.member, row_bytes=row_bytes):
        if found.kind == "lengths":
            moments += moments_of(np.concatenate([_native(row) for row in block]))
            continue
        array = _native(block)
        moments += moments_of(values_of(array))
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
        hashes.update(data.data[:left])
        left -= min(left, data.nbytes)
    return HashedContent(hashes=hashes.finish(), moments=moments)


def _native(block: Any) -> NDArray[Any]:
    array = np.asarray(block)
    return array.astype(array.dtype.newbyteorder("="), copy=False)
