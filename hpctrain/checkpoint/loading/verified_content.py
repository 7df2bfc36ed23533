"""Read tensors' content, verifying the hash of every extent that is touched. Not collective."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from hpctrain.checkpoint.files.huge_pages import fresh_tensor, memory_of
from hpctrain.checkpoint.format.boxes import Box, boxes_of_range, intersection, runs_of
from hpctrain.checkpoint.format.content_hash import hash_of
from hpctrain.checkpoint.format.damage import DamagedContentError, DamagedExtent
from hpctrain.checkpoint.format.metadata import StoredExtent, StoredPiece, StoredTensor
from hpctrain.checkpoint.loading.open_files import ContentFiles
from hpctrain.checkpoint.loading.read_ranges import ElementRun, flat_start, stretches_of

# Extents of a sharded tensor lie between each other in the file: a stretch that holds whole ones is read into
# memory and taken apart there, unless it is longer than this.
_LONGEST_STRETCH_BYTES = 64 << 20
# Shorter runs of an extent are not worth a read each: what lies between them is read, too.
_SHORT_RUN_BYTES = 32 << 10
# One number type per element size: copying boxes needs the width of an element and nothing else of it.
_WIDTH: dict[int, str] = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}

# Reads some of a tensor into memory that was set aside for it. Raises as `read_region`.
Read: TypeAlias = Callable[[ContentFiles], None]


def read_region(files: ContentFiles, *, tensor: StoredTensor, region: Box) -> torch.Tensor:
    """The elements in `region`, a box of the tensor's shape, on the CPU.

    Raises DamagedContentError, and CheckpointError or OSError when a file cannot be opened or is too short.
    """
    result, reads = planned(tensor, region=region)
    for read in reads:
        read(files)
    return result


def planned(tensor: StoredTensor, *, region: Box) -> tuple[torch.Tensor, list[Read]]:
    """Memory for `read_region`'s result, and the reads that fill it, in the order of the files. Raises CheckpointError
    where memory lacks.

    To be asked for of many tensors before the first is read: after each large one nothing of this is left in the
    processor's caches, and then it takes thirty times as long.
    """
    result = fresh_tensor(region.shape, dtype=tensor.dtype)
    if not result.numel():
        return result, []
    target = memory_of(result)
    found = (
        planned_stretch(tensor, piece=piece, stretch=stretch, region=region, target=target)
        for piece in tensor.pieces
        for stretch in stretches_of(piece)
    )
    return result, [read for read in found if read is not None]


def planned_stretch(
    tensor: StoredTensor, *, piece: StoredPiece, stretch: ElementRun, region: Box, target: np.ndarray
) -> Read | None:
    """What reads the part of `region` that one stretch of the file holds; None where it holds nothing of it.

    target: the bytes of `region` in row-major order, shape (num_bytes,).
    """
    elem_bytes = tensor.elem_bytes
    begin = flat_start(region, shape=tensor.shape)
    place = flat_start(piece.box, shape=tensor.view)
    if begin is not None and place is not None:  # both are one run of the tensor's elements
        first = place + stretch.start - begin
        if first >= region.num_elems or first + stretch.num_elems <= 0:
            return None
        if 0 <= first <= region.num_elems - stretch.num_elems and _fits_memory(stretch, elem_bytes):
            # The usual case: straight into its place, and hashed there while it is in the processor's cache.
            buffer = target[first * elem_bytes : (first + stretch.num_elems) * elem_bytes]
            return partial(_read_and_check, tensor=tensor, piece=piece, stretch=stretch, buffer=buffer)
    wanted = [extent for extent in stretch.extents if _touches(tensor, extent, region)]
    if not wanted:
        return None
    together = _fits_memory(stretch, elem_bytes) and (
        len(wanted) == len(stretch.extents) or _run_bytes(wanted[0], piece, elem_bytes) < _SHORT_RUN_BYTES
    )

    def read(files: ContentFiles) -> None:
        if together:
            buffer = files.scratch(stretch.num_elems * elem_bytes)
            for extent, content in _read_stretch(files, tensor, piece, stretch, buffer):
                if len(wanted) == len(stretch.extents) or extent in wanted:
                    _check(files, content, tensor=tensor, piece=piece, extent=extent)
                    _copy(content, tensor=tensor, extent=extent, region=region, target=target)
            return
        for extent in wanted:
            content = read_extent(files, tensor=tensor, piece=piece, extent=extent)
            _copy(content, tensor=tensor, extent=extent, region=region, target=target)

    return read


def read_extent(
    files: ContentFiles, *, tensor: StoredTensor, piece: StoredPiece, extent: StoredExtent
) -> np.ndarray:
    """The extent's bytes, shape (num_bytes,), after comparing their hash. Raises as `read_region`."""
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
    """Hash all extents of every num_ranks-th stretch and yield the ones that do not fit. progress: called before each
    stretch, with the bytes of those before it."""
    stretches = (
        (t, piece, stretch) for t in tensors for piece in t.pieces for stretch in stretches_of(piece)
    )
    done_bytes = 0
    for place, (tensor, piece, stretch) in enumerate(stretches):
        if place % num_ranks != rank:
            continue
        progress(done_bytes)
        done_bytes += stretch.num_elems * tensor.elem_bytes
        if not _fits_memory(stretch, tensor.elem_bytes):
            yield from _damaged_one_by_one(files, tensor, piece, stretch.extents)
            continue
        buffer = files.scratch(stretch.num_elems * tensor.elem_bytes)
        if len(stretch.extents) == 1:
            try:
                _read_and_check(files, tensor=tensor, piece=piece, stretch=stretch, buffer=buffer)
            except DamagedContentError as error:
                yield error.damage
            continue
        try:
            for extent, content in _read_stretch(files, tensor, piece, stretch, buffer):
                if hash_of(content) != extent.hash:
                    yield _damage(files, tensor, piece, extent, _DOES_NOT_FIT)
        except DamagedContentError:  # the storage cannot read all of it: which extents?
            yield from _damaged_one_by_one(files, tensor, piece, stretch.extents)


def _damaged_one_by_one(
    files: ContentFiles, tensor: StoredTensor, piece: StoredPiece, extents: Sequence[StoredExtent]
) -> Iterator[DamagedExtent]:
    for extent in extents:
        try:
            read_extent(files, tensor=tensor, piece=piece, extent=extent)
        except DamagedContentError as error:
            yield error.damage


def _read_and_check(
    files: ContentFiles, *, tensor: StoredTensor, piece: StoredPiece, stretch: ElementRun, buffer: np.ndarray
) -> None:
    """Read all of the stretch into `buffer`, and compare the hashes of its extents."""
    if len(stretch.extents) > 1:
        for extent, content in _read_stretch(files, tensor, piece, stretch, buffer):
            _check(files, content, tensor=tensor, piece=piece, extent=extent)
        return
    extent = stretch.extents[0]
    offset = piece.file_offset + stretch.start * tensor.elem_bytes
    with _told_as_damage(files, tensor, piece, extent):
        found = files.read_and_hash(piece.file, buffer.data, offset=offset)
    if found != extent.hash:
        raise DamagedContentError(_damage(files, tensor, piece, extent, _DOES_NOT_FIT))


def _read_stretch(
    files: ContentFiles, tensor: StoredTensor, piece: StoredPiece, stretch: ElementRun, buffer: np.ndarray
) -> Iterator[tuple[StoredExtent, np.ndarray]]:
    """Read all of the stretch into `buffer`; then as `_extents_in`."""
    _read(files, buffer, at=stretch.start, tensor=tensor, piece=piece, extent=stretch.extents[0])
    yield from _extents_in(files, tensor, piece, stretch, buffer)


def check_stretch(
    files: ContentFiles, *, tensor: StoredTensor, piece: StoredPiece, stretch: ElementRun, buffer: np.ndarray
) -> None:
    """Compare the hashes of a stretch that came into memory on another way. Raises DamagedContentError."""
    for extent, content in _extents_in(files, tensor, piece, stretch, buffer):
        _check(files, content, tensor=tensor, piece=piece, extent=extent)


def _extents_in(
    files: ContentFiles, tensor: StoredTensor, piece: StoredPiece, stretch: ElementRun, buffer: np.ndarray
) -> Iterator[tuple[StoredExtent, np.ndarray]]:
    """The stretch's extents, each with its bytes, shape (num_bytes,), which hold until the next is asked for."""
    if len(stretch.extents) == 1:
        yield stretch.extents[0], buffer
        return
    elements = buffer.view(_WIDTH[tensor.elem_bytes])
    strides = [tensor.elem_bytes] * len(piece.box.shape)
    for dim in range(len(strides) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * piece.box.shape[dim + 1]
    for extent in stretch.extents:
        inside = _inside(extent.box, piece.box)
        first = sum(o * s for o, s in zip(inside.offset, strides, strict=True)) // tensor.elem_bytes
        # Safe: `stretches_of` puts an extent's first and last element into its stretch.
        view = np.lib.stride_tricks.as_strided(
            elements[first - stretch.start :], shape=inside.shape, strides=strides, writeable=False
        )
        content = files.gather_scratch(inside.num_elems * tensor.elem_bytes)
        np.copyto(content.view(_WIDTH[tensor.elem_bytes]).reshape(inside.shape), view)
        yield extent, content


def _copy(
    content: np.ndarray, *, tensor: StoredTensor, extent: StoredExtent, region: Box, target: np.ndarray
) -> None:
    """Put what the extent holds of the region into its place."""
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
    """The extent as boxes of the tensor's own shape, each with its first element in the extent."""
    if tensor.view == tensor.shape:
        return [(0, extent.box)]
    first = extent.box.offset[0]
    placed, start = [], 0
    for box in boxes_of_range(tensor.shape, start=first, stop=first + extent.box.shape[0]):
        placed.append((start, box))
        start += box.num_elems
    return placed


def _fits_memory(stretch: ElementRun, elem_bytes: int) -> bool:
    return len(stretch.extents) == 1 or stretch.num_elems * elem_bytes <= _LONGEST_STRETCH_BYTES


def _run_bytes(extent: StoredExtent, piece: StoredPiece, elem_bytes: int) -> int:
    return runs_of(_inside(extent.box, piece.box), shape=piece.box.shape).run_elems * elem_bytes


def _inside(box: Box, piece: Box) -> Box:
    """A box of the view as one of the piece."""
    offset = tuple(o - p for o, p in zip(box.offset, piece.offset, strict=True))
    return Box(offset=offset, shape=box.shape)


def _read(
    files: ContentFiles,
    buffer: np.ndarray,
    *,
    at: int,
    tensor: StoredTensor,
    piece: StoredPiece,
    extent: StoredExtent,
) -> None:
    """Fill the buffer from element `at` of the piece on."""
    with _told_as_damage(files, tensor, piece, extent):
        files.read(piece.file, buffer.data, offset=piece.file_offset + at * tensor.elem_bytes)


@contextmanager
def _told_as_damage(
    files: ContentFiles, tensor: StoredTensor, piece: StoredPiece, extent: StoredExtent
) -> Iterator[None]:
    """A failing disk is reported as damage of `extent`."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be read: {os.strerror(error.errno or 0)}"
        raise DamagedContentError(_damage(files, tensor, piece, extent, reason)) from error


_DOES_NOT_FIT = "the content does not fit its hash"


def _check(
    files: ContentFiles,
    content: np.ndarray,
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
