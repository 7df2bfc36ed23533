"""Read tensors' content, verifying the hash of every extent that is touched. Not collective."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpctrain.checkpoint.boxes import Box, boxes_of_range, intersection, runs_of, whole
from hpctrain.checkpoint.dtypes import byte_view, empty_tensor
from hpctrain.checkpoint.file_bytes import read_fully
from hpctrain.checkpoint.hashing import hash_of
from hpctrain.checkpoint.metadata import StoredExtent, StoredTensor
from hpctrain.errors import CheckpointError

_CHUNK_BYTES = 4 << 20
# One number type per element size: copying boxes needs the width of an element and nothing else of it.
_WIDTH: dict[int, str] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """An extent whose bytes are not the ones written. first_byte, last_byte: of the file, both included; with
    an extent of a sharded tensor, other extents may lie between."""

    tensor: str
    box: Box
    first_byte: int
    last_byte: int
    reason: str

    def __str__(self) -> str:
        return (
            f"tensor {self.tensor!r}, bytes {self.first_byte} to {self.last_byte} of the file: {self.reason}"
        )


class DamagedContentError(CheckpointError):
    """Content that does not fit its hash. `damage` says where."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(f"damaged: {damage}")
        self.damage = damage


def read_tensor(fd: int, *, tensor: StoredTensor) -> torch.Tensor:
    """The whole tensor, on the CPU. Raises DamagedContentError, CheckpointError, OSError."""
    result = empty_tensor(tensor.shape, dtype=tensor.dtype)
    content = byte_view(result).numpy()  # no copy: writes go to `result`
    if len(tensor.view) == 1:
        for _, extent in tensor.extents:
            start = extent.box.offset[0] * tensor.elem_bytes
            piece = content[start : start + extent.box.shape[0] * tensor.elem_bytes]
            _read(fd, piece.data, offset=tensor.pieces[0].file_offset + start, tensor=tensor, extent=extent)
            _check(piece, tensor=tensor, extent=extent)
        return result
    # Extents of a sharded tensor are interleaved in the file: read it in one go, then hash them in memory.
    for start in range(0, len(content), _CHUNK_BYTES):
        piece = content[start : start + _CHUNK_BYTES]
        read_fully(fd, piece.data, offset=tensor.pieces[0].file_offset + start)
    elements = _elements(content, shape=tensor.view, elem_bytes=tensor.elem_bytes)
    for _, extent in tensor.extents:
        _check(np.ascontiguousarray(elements[extent.box.slices()]), tensor=tensor, extent=extent)
    return result


def read_region(fd: int, *, tensor: StoredTensor, region: Box) -> torch.Tensor:
    """The elements in `region`, a box of the tensor's shape. Raises as `read_tensor`."""
    if region == whole(tensor.shape):
        return read_tensor(fd, tensor=tensor)
    result = empty_tensor(region.shape, dtype=tensor.dtype)
    target = _elements(byte_view(result).numpy(), shape=region.shape, elem_bytes=tensor.elem_bytes)
    for _, extent in tensor.extents:
        parts = [(start, box) for start, box in _in_tensor(tensor, extent) if intersection(box, region)]
        if not parts:
            continue
        content = read_extent(fd, tensor=tensor, extent=extent)
        for start, box in parts:
            shared = intersection(box, region)
            assert shared is not None
            begin = start * tensor.elem_bytes
            piece = content[begin : begin + box.num_elems * tensor.elem_bytes]
            source = _elements(piece, shape=box.shape, elem_bytes=tensor.elem_bytes)
            target[shared.slices(origin=region.offset)] = source[shared.slices(origin=box.offset)]
    return result


def read_extent(fd: int, *, tensor: StoredTensor, extent: StoredExtent) -> np.ndarray:
    """The extent's bytes, shape (nbytes,), after comparing their hash. Raises as `read_tensor`."""
    content = np.empty(extent.box.num_elems * tensor.elem_bytes, dtype=np.uint8)
    runs = runs_of(extent.box, shape=tensor.view)
    run_bytes = runs.run_elems * tensor.elem_bytes
    for place, start in enumerate(runs.starts.tolist()):
        piece = content[place * run_bytes : (place + 1) * run_bytes].data
        offset = tensor.pieces[0].file_offset + start * tensor.elem_bytes
        _read(fd, piece, offset=offset, tensor=tensor, extent=extent)
    _check(content, tensor=tensor, extent=extent)
    return content


def find_damage(
    path_fd: int, *, tensors: Sequence[StoredTensor], rank: int = 0, num_ranks: int = 1
) -> Iterator[Damage]:
    """Hash every num_ranks-th extent and yield the ones that do not fit."""
    place = 0
    for tensor in tensors:
        for _, extent in tensor.extents:
            if place % num_ranks == rank:
                try:
                    read_extent(path_fd, tensor=tensor, extent=extent)
                except DamagedContentError as error:
                    yield error.damage
            place += 1


def _in_tensor(tensor: StoredTensor, extent: StoredExtent) -> list[tuple[int, Box]]:
    """The extent as boxes of the tensor's own shape, each with its first element in the extent."""
    if tensor.view == tensor.shape:
        return [(0, extent.box)]
    first = extent.box.offset[0]
    placed, start = [], 0
    for box in boxes_of_range(tensor.shape, start=first, stop=first + extent.box.shape[0]):
        placed.append((start, box))
        start += box.num_elems
    return placed


def _elements(content: np.ndarray, *, shape: Sequence[int], elem_bytes: int) -> np.ndarray:
    return content.view(_WIDTH[elem_bytes]).reshape(tuple(shape))


def _read(fd: int, buffer: memoryview, *, offset: int, tensor: StoredTensor, extent: StoredExtent) -> None:
    """Read, and report a failing disk as damage of this extent."""
    try:
        read_fully(fd, buffer, offset=offset)
    except OSError as error:
        raise DamagedContentError(
            _damage(tensor, extent, f"cannot be read: {os.strerror(error.errno or 0)}")
        ) from error


def _check(content: np.ndarray, *, tensor: StoredTensor, extent: StoredExtent) -> None:
    if hash_of(content) != extent.hash:
        raise DamagedContentError(_damage(tensor, extent, "the content does not fit its hash"))


def _damage(tensor: StoredTensor, extent: StoredExtent, reason: str) -> Damage:
    runs = runs_of(extent.box, shape=tensor.view)
    first = tensor.pieces[0].file_offset + int(runs.starts[0]) * tensor.elem_bytes
    last = tensor.pieces[0].file_offset + (int(runs.starts[-1]) + runs.run_elems) * tensor.elem_bytes - 1
    return Damage(tensor=tensor.name, box=extent.box, first_byte=first, last_byte=last, reason=reason)
