"""Reads tensor content and verifies the hash of every extent that it reads from. Not collective.

A piece is the part of a tensor that one HDF5 dataset holds. An extent is a box of a piece that has a hash of its
own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.files.direct_io import fresh_tensor, memory_of
from hpctrain.checkpoint.format.boxes import Box, boxes_of_range, intersection, runs_of
from hpctrain.checkpoint.format.metadata import StoredExtent, StoredPiece, StoredTensor
from hpctrain.checkpoint.loading.check_structure import ContentFiles
from hpctrain.errors import CheckpointError
from hpctrain.storage import hash_of

# Runs of elements of a piece that are read at once, because the extents in them interleave in the file.
# Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementRun:
    """A range of elements of an HDF5 dataset (a piece of a tensor) that is read at once.

    The elements are `start` to `start + num_elems - 1` in row-major order. They make up the `extents`, which are
    regions with one hash each. Each extent lies entirely in one run. A run with a single extent consists of exactly the
    elements of this extent.
    """

    start: int
    num_elems: int
    extents: Sequence[StoredExtent]


def element_runs_of(piece: StoredPiece) -> Iterator[ElementRun]:
    """Divides a piece (an HDF5 dataset with a part of a tensor) into ranges of elements, and yields them in order.

    The piece is cut wherever the cut divides no extent. An extent is a region of the piece that has one hash.
    """
    if len(piece.extents) == 1:  # fast path for thousands of small tensors
        yield ElementRun(start=0, num_elems=piece.box.num_elems, extents=piece.extents)
        return
    strides = strides_of(piece.box.shape)
    placed = []
    for extent in piece.extents:
        first = last = 0
        for o, n, p, s in zip(extent.box.offset, extent.box.shape, piece.box.offset, strides, strict=True):
            first += (o - p) * s
            last += (o - p + n - 1) * s
        placed.append((first, last + 1, extent))
    placed.sort(key=lambda entry: entry[0])
    group: list[StoredExtent] = []
    begin = end = 0
    for first, stop, extent in placed:
        if group and first >= end:
            yield ElementRun(start=begin, num_elems=end - begin, extents=group)
            group = []
        if not group:
            begin, end = first, stop
        group.append(extent)
        end = max(end, stop)
    if group:
        yield ElementRun(start=begin, num_elems=end - begin, extents=group)


def flat_start(box: Box, *, shape: Sequence[int]) -> int | None:
    """Returns the position of the first element of a box (rectangular region) in the flattened array of `shape`.

    Returns None if the box is not contiguous in that array. The box must not be empty.
    """
    inner_full = True
    start, stride = 0, 1
    for dim in range(len(shape) - 1, -1, -1):
        if box.shape[dim] > 1 and not inner_full:
            return None
        inner_full = inner_full and box.shape[dim] == shape[dim]
        start += box.offset[dim] * stride
        stride *= shape[dim]
    return start


def strides_of(shape: Sequence[int]) -> list[int]:
    """Returns the row-major strides of an array of `shape`, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


# Errors that locate damaged tensor content.


@dataclass(frozen=True, kw_only=True, slots=True)
class DamagedExtent:
    """An extent (a box of a tensor with one hash) whose bytes are not those that were written, or cannot be read.

    The bytes of the extent lie between `first_byte` and `last_byte` (both inclusive) of `file`. Bytes of other
    extents of a sharded tensor may lie between them.
    """

    tensor: str
    box: Box
    file: str
    first_byte: int
    last_byte: int
    reason: str

    def __str__(self) -> str:
        place = f"bytes {self.first_byte} to {self.last_byte} of {self.file}"
        return f"tensor {self.tensor!r}, {place}: {self.reason}"


class DamagedContentError(CheckpointError):
    """Raised if a region of a tensor (an extent, which has one hash) is damaged or cannot be read.

    `damage` describes the extent.
    """

    def __init__(self, damage: DamagedExtent) -> None:
        super().__init__(f"damaged: {damage}")
        self.damage = damage


# Reads tensor content and verifies the hash of every extent that it reads from.


# Extents of a sharded tensor interleave in the file. An element run (`ElementRun`; parameter `element_run`) of several
# extents is read into memory and separated there, unless it is longer than this.
_LONGEST_RUN_BYTES = 64 << 20
# If the contiguous runs of an extent are shorter, one read that includes the bytes between them is faster.
_SHORT_RUN_BYTES = 32 << 10
# A number type for each element size: copying boxes depends on the size of an element only.
_WIDTH: dict[int, str] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}

# Reads a part of a tensor into memory allocated for it. Raises as `read_region`.
Read: TypeAlias = Callable[[ContentFiles], None]


def read_region(files: ContentFiles, *, tensor: StoredTensor, region: Box) -> torch.Tensor:
    """Reads and verifies the elements in `region`, a box (rectangular region) of the tensor.

    Returns a CPU tensor of the tensor's dtype and of shape `region.shape`. Raises DamagedContentError, and
    CheckpointError or OSError if a file cannot be opened or is too short.
    """
    result, reads = planned(tensor, region=region)
    for read in reads:
        read(files)
    return result


def planned(tensor: StoredTensor, *, region: Box) -> tuple[torch.Tensor, list[Read]]:
    """Plans the reading of `region`, a box (rectangular region) of a tensor, without reading yet.

    Returns the tensor for the result, still uninitialized, and the functions that will fill the tensor, in the order of
    the file. Plan many tensors before you read the first: reading a large tensor evicts this code and its data from the
    processor's caches, after which planning takes thirty times as long. Raises CheckpointError if there is not enough
    memory.
    """
    result = fresh_tensor(region.shape, dtype=tensor.dtype)
    if not result.numel():
        return result, []
    target = memory_of(result)
    found = (
        planned_run(tensor, piece=piece, element_run=element_run, region=region, target=target)
        for piece in tensor.pieces
        for element_run in element_runs_of(piece)
    )
    return result, [read for read in found if read is not None]


def planned_run(
    tensor: StoredTensor, *, piece: StoredPiece, element_run: ElementRun, region: Box, target: NDArray[Any]
) -> Read | None:
    """Returns a function that reads those elements of `region` that lie in `element_run`; None if none do.

    `piece` is an HDF5 dataset with a part of the tensor, `element_run` a range of its elements, and `region` a box
    (rectangular region) of the tensor. The function verifies what it reads, and writes to `target`, the bytes of
    `region` in row-major order: uint8, shape (num_bytes,).
    """
    elem_bytes = tensor.elem_bytes
    begin = flat_start(region, shape=tensor.shape)
    place = flat_start(piece.box, shape=tensor.view)
    if begin is not None and place is not None:  # both are contiguous in the tensor
        first = place + element_run.start - begin
        if first >= region.num_elems or first + element_run.num_elems <= 0:
            return None
        if 0 <= first <= region.num_elems - element_run.num_elems and _fits_memory(element_run, elem_bytes):
            # The usual case: read directly into `target`, and hash it there while it is in the processor's cache.
            buffer = target[first * elem_bytes : (first + element_run.num_elems) * elem_bytes]
            return partial(
                _read_and_check, tensor=tensor, piece=piece, element_run=element_run, buffer=buffer
            )
    wanted = [extent for extent in element_run.extents if _touches(tensor, extent, region)]
    if not wanted:
        return None
    together = _fits_memory(element_run, elem_bytes) and (
        len(wanted) == len(element_run.extents) or _run_bytes(wanted[0], piece, elem_bytes) < _SHORT_RUN_BYTES
    )

    def read(files: ContentFiles) -> None:
        if together:
            buffer = files.scratch(element_run.num_elems * elem_bytes)
            for extent, content in _read_run(files, tensor, piece, element_run, buffer):
                if len(wanted) == len(element_run.extents) or extent in wanted:
                    _check(files, content, tensor=tensor, piece=piece, extent=extent)
                    _copy(content, tensor=tensor, extent=extent, region=region, target=target)
            return
        for extent in wanted:
            content = read_extent(files, tensor=tensor, piece=piece, extent=extent)
            _copy(content, tensor=tensor, extent=extent, region=region, target=target)

    return read


def read_extent(
    files: ContentFiles, *, tensor: StoredTensor, piece: StoredPiece, extent: StoredExtent
) -> NDArray[Any]:
    """Reads and verifies an extent (a region of a tensor that has one hash): uint8, shape (num_bytes,).

    `piece` is the HDF5 dataset that contains the extent. Raises DamagedContentError, and CheckpointError or OSError if
    a file cannot be opened or is too short.
    """
    content = np.empty(extent.box.num_elems * tensor.elem_bytes, dtype=np.uint8)
    runs = runs_of(_inside(extent.box, piece.box), shape=piece.box.shape)
    run_bytes = runs.run_elems * tensor.elem_bytes
    for place, start in enumerate(runs.starts.tolist()):
        part = content[place * run_bytes : (place + 1) * run_bytes]
        _read(files, part, at=start, tensor=tensor, piece=piece, extent=extent)
    _check(files, content, tensor=tensor, piece=piece, extent=extent)
    return content


def find_damage(
    files: ContentFiles,
    *,
    tensors: Sequence[StoredTensor],
    rank: int = 0,
    num_ranks: int = 1,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[DamagedExtent]:
    """Reads and hashes this rank's share of the tensors, and yields the damaged extents. Not collective.

    An extent is a region of a tensor that has one hash. The tensors are divided into ranges of elements (`ElementRun`).
    The share of a rank is every `num_ranks`-th range, beginning with the range of index `rank`. `progress` is called
    before each range with the number of bytes hashed so far.
    """
    element_runs = (
        (t, piece, element_run)
        for t in tensors
        for piece in t.pieces
        for element_run in element_runs_of(piece)
    )
    done_bytes = 0
    for place, (tensor, piece, element_run) in enumerate(element_runs):
        if place % num_ranks != rank:
            continue
        progress(done_bytes)
        done_bytes += element_run.num_elems * tensor.elem_bytes
        if not _fits_memory(element_run, tensor.elem_bytes):
            yield from _damaged_one_by_one(files, tensor, piece, element_run.extents)
            continue
        buffer = files.scratch(element_run.num_elems * tensor.elem_bytes)
        if len(element_run.extents) == 1:
            try:
                _read_and_check(files, tensor=tensor, piece=piece, element_run=element_run, buffer=buffer)
            except DamagedContentError as error:
                yield error.damage
            continue
        try:
            for extent, content in _read_run(files, tensor, piece, element_run, buffer):
                if hash_of(content) != extent.hash:
                    yield _damage(files, tensor, piece, extent, _DOES_NOT_FIT)
        except DamagedContentError:  # a read error: find the extents that cannot be read
            yield from _damaged_one_by_one(files, tensor, piece, element_run.extents)


def _damaged_one_by_one(
    files: ContentFiles, tensor: StoredTensor, piece: StoredPiece, extents: Sequence[StoredExtent]
) -> Iterator[DamagedExtent]:
    for extent in extents:
        try:
            read_extent(files, tensor=tensor, piece=piece, extent=extent)
        except DamagedContentError as error:
            yield error.damage


def _read_and_check(
    files: ContentFiles,
    *,
    tensor: StoredTensor,
    piece: StoredPiece,
    element_run: ElementRun,
    buffer: NDArray[Any],
) -> None:
    """Reads a range of elements into `buffer` (uint8, shape (num_bytes,)) and verifies the hashes of its extents.

    `element_run` is the range, and `piece` the HDF5 dataset that contains it. Raises DamagedContentError, and
    CheckpointError or OSError if a file cannot be opened or is too short.
    """
    if len(element_run.extents) > 1:
        for extent, content in _read_run(files, tensor, piece, element_run, buffer):
            _check(files, content, tensor=tensor, piece=piece, extent=extent)
        return
    extent = element_run.extents[0]
    offset = piece.file_offset + element_run.start * tensor.elem_bytes
    with _raised_as_damage(files, tensor, piece, extent):
        found = files.read_and_hash(piece.file, buffer.data, offset=offset)
    if found != extent.hash:
        raise DamagedContentError(_damage(files, tensor, piece, extent, _DOES_NOT_FIT))


def _read_run(
    files: ContentFiles,
    tensor: StoredTensor,
    piece: StoredPiece,
    element_run: ElementRun,
    buffer: NDArray[Any],
) -> Iterator[tuple[StoredExtent, NDArray[Any]]]:
    """Reads the range of elements `element_run` into `buffer`, then yields each of its extents with its bytes.

    The bytes of an extent (a region with one hash) are valid until the next extent is yielded.
    """
    _read(files, buffer, at=element_run.start, tensor=tensor, piece=piece, extent=element_run.extents[0])
    yield from _extents_in(files, tensor, piece, element_run, buffer)


def check_run(
    files: ContentFiles,
    *,
    tensor: StoredTensor,
    piece: StoredPiece,
    element_run: ElementRun,
    buffer: NDArray[Any],
) -> None:
    """Verifies the hashes of the range of elements `element_run`, which another rank has read and sent.

    `piece` is the HDF5 dataset that contains the range. `buffer` contains the received bytes of the range: uint8, shape
    (num_bytes,). Raises DamagedContentError.
    """
    for extent, content in _extents_in(files, tensor, piece, element_run, buffer):
        _check(files, content, tensor=tensor, piece=piece, extent=extent)


def _extents_in(
    files: ContentFiles,
    tensor: StoredTensor,
    piece: StoredPiece,
    element_run: ElementRun,
    buffer: NDArray[Any],
) -> Iterator[tuple[StoredExtent, NDArray[Any]]]:
    """Yields each extent (a region with one hash) of the range of elements `element_run`, with its bytes.

    `buffer` contains the bytes of the range. The bytes of an extent, uint8 of shape (num_bytes,), are valid until the
    next extent is yielded.
    """
    if len(element_run.extents) == 1:
        yield element_run.extents[0], buffer
        return
    elements = buffer.view(_WIDTH[tensor.elem_bytes])
    strides = [tensor.elem_bytes] * len(piece.box.shape)
    for dim in range(len(strides) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * piece.box.shape[dim + 1]
    for extent in element_run.extents:
        inside = _inside(extent.box, piece.box)
        first = sum(o * s for o, s in zip(inside.offset, strides, strict=True)) // tensor.elem_bytes
        # The view stays inside the buffer: a run holds the first and the last element of each of its extents.
        view = np.lib.stride_tricks.as_strided(
            elements[first - element_run.start :], shape=inside.shape, strides=strides, writeable=False
        )
        content = files.gather_scratch(inside.num_elems * tensor.elem_bytes)
        np.copyto(content.view(_WIDTH[tensor.elem_bytes]).reshape(inside.shape), view)
        yield extent, content


def _copy(
    content: NDArray[Any], *, tensor: StoredTensor, extent: StoredExtent, region: Box, target: NDArray[Any]
) -> None:
    """Copies the elements that are both in `extent` and in `region` from `content` to `target`.

    `content` contains the bytes of the extent, and `target` those of the region, which is a box of the tensor.
    """
    elements = target.view(_WIDTH[tensor.elem_bytes]).reshape(region.shape)
    for start, box in _in_tensor(tensor, extent):
        shared = intersection(box, region)
        if shared is not None:
            begin = start * tensor.elem_bytes
            part = content[begin : begin + box.num_elems * tensor.elem_bytes]
            source = part.view(_WIDTH[tensor.elem_bytes]).reshape(box.shape)
            elements[shared.slices(origin=region.offset)] = source[shared.slices(origin=box.offset)]


def _touches(tensor: StoredTensor, extent: StoredExtent, region: Box) -> bool:
    return any(intersection(box, region) is not None for _, box in _in_tensor(tensor, extent))


def _in_tensor(tensor: StoredTensor, extent: StoredExtent) -> list[tuple[int, Box]]:
    """Returns the boxes (rectangular regions) of the tensor that together make up `extent`.

    Each box comes after the position of its first element among the elements of the extent, a region with one hash.
    """
    if tensor.view == tensor.shape:
        return [(0, extent.box)]
    first = extent.box.offset[0]
    placed, start = [], 0
    for box in boxes_of_range(tensor.shape, start=first, stop=first + extent.box.shape[0]):
        placed.append((start, box))
        start += box.num_elems
    return placed


def _fits_memory(element_run: ElementRun, elem_bytes: int) -> bool:
    return len(element_run.extents) == 1 or element_run.num_elems * elem_bytes <= _LONGEST_RUN_BYTES


def _run_bytes(extent: StoredExtent, piece: StoredPiece, elem_bytes: int) -> int:
    return runs_of(_inside(extent.box, piece.box), shape=piece.box.shape).run_elems * elem_bytes


def _inside(box: Box, piece: Box) -> Box:
    """Returns `box` relative to the origin of `piece`, the part of a tensor that contains it.

    Both boxes (rectangular regions) are given in the coordinates of the tensor.
    """
    offset = tuple(o - p for o, p in zip(box.offset, piece.offset, strict=True))
    return Box(offset=offset, shape=box.shape)


def _read(
    files: ContentFiles,
    buffer: NDArray[Any],
    *,
    at: int,
    tensor: StoredTensor,
    piece: StoredPiece,
    extent: StoredExtent,
) -> None:
    """Fills `buffer` with the bytes of `piece`, an HDF5 dataset, that begin at its element `at`.

    Raises DamagedContentError for `extent`, which contains that element, if the storage fails.
    """
    with _raised_as_damage(files, tensor, piece, extent):
        files.read(piece.file, buffer.data, offset=piece.file_offset + at * tensor.elem_bytes)


@contextmanager
def _raised_as_damage(
    files: ContentFiles, tensor: StoredTensor, piece: StoredPiece, extent: StoredExtent
) -> Iterator[None]:
    """Context in which an OSError becomes a DamagedContentError that names `extent`, a region with one hash."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be read: {os.strerror(error.errno or 0)}"
        raise DamagedContentError(_damage(files, tensor, piece, extent, reason)) from error


_DOES_NOT_FIT = "the content does not fit its hash"


def _check(
    files: ContentFiles,
    content: NDArray[Any],
    *,
    tensor: StoredTensor,
    piece: StoredPiece,
    extent: StoredExtent,
) -> None:
    if hash_of(content) != extent.hash:
        raise DamagedContentError(_damage(files, tensor, piece, extent, _DOES_NOT_FIT))


def _damage(
    files: ContentFiles, tensor: StoredTensor, piece: StoredPiece, extent: StoredExtent, reason: str
) -> DamagedExtent:
    runs = runs_of(_inside(extent.box, piece.box), shape=piece.box.shape)
    first = piece.file_offset + int(runs.starts[0]) * tensor.elem_bytes
    last = piece.file_offset + (int(runs.starts[-1]) + runs.run_elems) * tensor.elem_bytes - 1
    return DamagedExtent(
        tensor=tensor.name,
        box=extent.box,
        file=files.name(piece.file),
        first_byte=first,
        last_byte=last,
        reason=reason,
    )
