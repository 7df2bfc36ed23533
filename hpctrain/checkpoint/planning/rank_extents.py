"""The bytes that one rank writes: taken from its tensors or from a copy of them, and hashed just before writing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from hpctrain.checkpoint.files.direct_io import BLOCK_BYTES, Staging
from hpctrain.checkpoint.format.boxes import Box, runs_of
from hpctrain.checkpoint.format.dtypes import byte_view
from hpctrain.checkpoint.format.state import Item
from hpctrain.checkpoint.planning.write_plan import PieceKey, PlannedPiece, WritePlan
from hpctrain.errors import CheckpointError

# Small tensors are joined, since calls cost more than their bytes. Joined groups are small enough to stay in the
# processor's cache until they are written.
_SMALL_BYTES = 1 << 16
_JOINED_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A byte range of one tensor, in row-major order.

    `source` is the index of the tensor among those that the rank passes to the save (`State.sources()`), and `start`
    the position of the range's first byte in the tensor.
    """

    source: int
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtentGroup:
    """Byte ranges of tensors (segments) whose bytes are taken from memory at once.

    A group has one segment, or several small segments that are contiguous in the file. An extent is a region of a
    tensor that has one hash. `extents` contains the extents in the group, in order, as indices into the list of the
    rank's extents. `offset` is the file offset of a group of small segments. For any other single segment `offset` is
    None: its extents have byte ranges of their own in the file (`OwnBytes.runs`).
    """

    segments: tuple[Segment, ...]
    extents: Sequence[int]
    num_bytes: int
    offset: int | None


# Groups with their bytes. The bytes stay valid until the save is finished, but those of groups joined in memory of a
# `Staging` only until the next group is taken.
Content: TypeAlias = Iterator[tuple[ExtentGroup, memoryview]]


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnBytes:
    """Which bytes one rank writes to its file. An extent is a region of a tensor that has one hash.

    Attributes:
        groups: Groups of byte ranges of tensors, in file order.
        extent_bytes: Length of each extent, in the plan's order.
        runs: For each extent, the byte ranges of the file, (offset, length), that hold the extent's bytes, in the
            order of these bytes.
    """

    groups: tuple[ExtentGroup, ...]
    extent_bytes: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.extent_bytes)

    def byte_ranges(
        self, content: Content, *, hashes: NDArray[np.uint64]
    ) -> Iterator[tuple[int, memoryview]]:
        """Yields `content` as byte ranges of the file, (offset, bytes), and stores the hashes in `hashes`.

        An extent is a region of a tensor that has one hash. Each extent is hashed just before its bytes are yielded, so
        that they are still in the processor's cache when they are written. `hashes` is an array of uint64, shape
        (num_extents,).
        """
        digest, sizes = xxhash.xxh3_64_intdigest, self.extent_bytes
        for group, data in content:
            position = 0
            if group.offset is not None:
                found = []
                for number in group.extents:
                    end = position + sizes[number]
                    found.append(digest(data[position:end]))
                    position = end
                hashes[group.extents] = found
                yield group.offset, data
                continue
            for number in group.extents:
                extent = data[position : position + sizes[number]]
                position += sizes[number]
                hashes[number] = digest(extent)
                begin = 0
                for offset, num_bytes in self.runs[number]:
                    yield offset, extent[begin : begin + num_bytes]
                    begin += num_bytes


def own_bytes(
    plan: WritePlan, *, rank: int, pieces: Mapping[PieceKey, PlannedPiece], offsets: Mapping[PieceKey, int]
) -> OwnBytes:
    """Returns which bytes `rank` writes, and where they lie in its file.

    `pieces` are the pieces (HDF5 datasets) in the rank's file, `offsets` the file offsets of these pieces.
    """
    extent_bytes: list[int] = []
    runs: list[tuple[tuple[int, int], ...]] = []
    segments: list[tuple[Segment, range]] = []  # each with its extents
    for number, extent in enumerate(plan.extents_of(rank)):
        tensor = plan.tensors[extent.tensor]
        piece = pieces[extent.tensor, extent.piece]
        elem_bytes = tensor.elem_bytes
        num_bytes = extent.box.num_elems * elem_bytes
        start = extent.source_start * elem_bytes
        base = offsets[extent.tensor, extent.piece]
        if len(tensor.view) == 1:
            first = base + (extent.box.offset[0] - piece.box.offset[0]) * elem_bytes
            runs.append(((first, num_bytes),))
        else:
            inside = Box(
                offset=tuple(o - b for o, b in zip(extent.box.offset, piece.box.offset, strict=True)),
                shape=extent.box.shape,
            )
            found = runs_of(inside, shape=piece.box.shape)
            run_bytes = found.run_elems * elem_bytes
            runs.append(tuple((base + first * elem_bytes, run_bytes) for first in found.starts.tolist()))
        extent_bytes.append(num_bytes)
        last, numbers = segments[-1] if segments else (None, range(0))
        if last is not None and last.source == extent.source and last.start + last.num_bytes == start:
            last = Segment(source=last.source, start=last.start, num_bytes=last.num_bytes + num_bytes)
            segments[-1] = last, range(numbers.start, number + 1)
        else:
            segment = Segment(source=extent.source, start=start, num_bytes=num_bytes)
            segments.append((segment, range(number, number + 1)))
    segments.sort(key=lambda entry: runs[entry[1][0]][0][0])  # as they lie in the file
    return OwnBytes(
        groups=tuple(_grouped(segments, runs)), extent_bytes=tuple(extent_bytes), runs=tuple(runs)
    )


def join_segments(segments: Sequence[Segment]) -> OwnBytes:
    """Lays out byte ranges of tensors one after another, as if each were an extent of a file.

    An extent is a region that has one hash. The first segment begins at offset 0, each other segment where the previous
    one ends.
    """
    runs: list[tuple[tuple[int, int], ...]] = []
    position = 0
    for segment in segments:
        runs.append(((position, segment.num_bytes),))
        position += segment.num_bytes
    numbered = [(segment, range(number, number + 1)) for number, segment in enumerate(segments)]
    return OwnBytes(
        groups=tuple(_grouped(numbered, runs)),
        extent_bytes=tuple(segment.num_bytes for segment in segments),
        runs=tuple(runs),
    )


def _grouped(
    segments: Sequence[tuple[Segment, range]], runs: Sequence[tuple[tuple[int, int], ...]]
) -> Iterator[ExtentGroup]:
    small: list[Segment] = []
    extents: list[int] = []
    begin = end = 0
    for segment, numbers in segments:
        is_small = segment.num_bytes < _SMALL_BYTES and len(numbers) == 1 and len(runs[numbers[0]]) == 1
        offset = runs[numbers[0]][0][0]
        if small and (not is_small or offset != end or end + segment.num_bytes - begin > _JOINED_BYTES):
            yield ExtentGroup(segments=tuple(small), extents=extents, num_bytes=end - begin, offset=begin)
            small, extents = [], []
        if not is_small:
            yield ExtentGroup(segments=(segment,), extents=numbers, num_bytes=segment.num_bytes, offset=None)
            continue
        if not small:
            begin = end = offset
        small.append(segment)
        extents.append(numbers[0])
        end += segment.num_bytes
    if small:
        yield ExtentGroup(segments=tuple(small), extents=extents, num_bytes=end - begin, offset=begin)


def content_of(
    sources: Sequence[Item], own: OwnBytes, *, groups: Iterable[ExtentGroup], staging: Staging
) -> Content:
    """Yields each of `groups`, which list byte ranges of the tensors `sources`, with its bytes.

    The groups are those of `own`, what this rank writes. Small tensors are joined in memory of `staging`. Large tensors
    are not copied, unless they are not contiguous or are on a device. Large tensors on a device are copied to the host
    one extent (region with one hash) at a time, so the host never holds a whole copy.
    """
    for group in groups:
        if group.offset is not None:
            joined = staging.memory_for(group.offset, group.num_bytes)
            _copy_group(torch.from_numpy(joined), sources, group, wait=True)
            yield group, joined.data
            continue
        view = view_of(sources, group.segments[0])
        if view.device.type == "cpu":
            yield group, view.numpy().data
            continue
        position = 0
        for number in group.extents:
            num_bytes = own.extent_bytes[number]
            part = replace(group, extents=(number,), num_bytes=num_bytes)
            yield part, view[position : position + num_bytes].cpu().numpy().data
            position += num_bytes


def copy_to(buffer: torch.Tensor, sources: Sequence[Item], own: OwnBytes) -> None:
    """Copies all bytes that this rank writes into `buffer`: uint8, shape (copy_bytes(own),), on the host.

    The bytes are those of the tensors `sources` that `own` lists. Copies from a device are queued on the device's
    current stream: synchronize before reading the buffer or changing a tensor.
    """
    for group, position in zip(own.groups, _places(own), strict=True):
        _copy_group(buffer[position : position + group.num_bytes], sources, group, wait=False)


def content_in(buffer: torch.Tensor, own: OwnBytes) -> Content:
    """Yields each group of `own` with its bytes, from a buffer (uint8) that `copy_to` has filled.

    A group lists byte ranges of tensors.
    """
    data = buffer.numpy().data
    for group, position in zip(own.groups, _places(own), strict=True):
        yield group, data[position : position + group.num_bytes]


def copy_bytes(own: OwnBytes) -> int:
    """Returns the size of the buffer that `copy_to` fills, in bytes."""
    end = 0
    for group, position in zip(own.groups, _places(own), strict=True):
        end = position + group.num_bytes
    return end


def _places(own: OwnBytes) -> Iterator[int]:
    """Yields, for each group of byte ranges in `own`, its position in the buffer that `copy_to` fills.

    A large group has the same offset within a block of BLOCK_BYTES as in the file, so that direct I/O can write it
    without another copy.
    """
    position = 0
    for group in own.groups:
        if group.num_bytes >= _SMALL_BYTES and group.offset is None:
            position += (own.runs[group.extents[0]][0][0] - position) % BLOCK_BYTES
        yield position
        position += group.num_bytes


def _copy_group(target: torch.Tensor, sources: Sequence[Item], group: ExtentGroup, *, wait: bool) -> None:
    """Copies a group of byte ranges of tensors into `target`: uint8, shape (group.num_bytes,), on the host.

    Small tensors that are on one device are joined on that device and copied at once. Unless `wait` is set, copies from
    a device are only queued.
    """
    if group.offset is None:
        target.copy_(view_of(sources, group.segments[0]), non_blocking=not wait)
        return
    if _copy_small(target.data_ptr(), sources, group.segments):
        return
    views = [view_of(sources, segment) for segment in group.segments]
    if len({view.device for view in views}) == 1:
        target.copy_(torch.cat(views), non_blocking=not wait)
        return
    position = 0
    for view in views:
        target[position : position + len(view)].copy_(view, non_blocking=not wait)
        position += len(view)


def _copy_small(address: int, sources: Sequence[Item], segments: Sequence[Segment]) -> bool:
    """Copies small byte ranges of tensors to the memory at `address` with memmove, which is faster than torch.

    Returns False, perhaps after copying some segments, if a segment is not on the host.
    """
    for segment in segments:
        tensor, start = sources[segment.source].tensor, segment.start
        if not tensor.is_cpu:
            return False
        if not (tensor.is_contiguous() and type(tensor) in _PLAIN) or tensor.is_neg() or tensor.is_conj():
            tensor, start = view_of(sources, segment), 0
        source = tensor.data_ptr()
        if not source:
            raise CheckpointError(
                f"a tensor of shape {list(tensor.shape)} and {tensor.dtype} has no memory of its own: it was freed, or "
                "is a wrapper of other tensors. Save those instead"
            )
        _memmove(address, source + start, segment.num_bytes)
        address += segment.num_bytes
    return True


def view_of(sources: Sequence[Item], segment: Segment) -> torch.Tensor:
    """Returns the bytes of `segment`, a byte range of a tensor: uint8, shape (num_bytes,), on its device.

    If the tensor is not contiguous, only the rows that contain the bytes are copied.
    """
    tensor, begin, end = sources[segment.source].tensor, segment.start, segment.start + segment.num_bytes
    if tensor.dim() and len(tensor) > 1 and not tensor.is_contiguous():
        row_bytes = tensor.nbytes // len(tensor)
        first = begin // row_bytes
        tensor = tensor[first : -(-end // row_bytes)]
        begin, end = begin - first * row_bytes, end - first * row_bytes
    return byte_view(tensor)[begin:end]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# PyDLL keeps the interpreter lock, since releasing and reacquiring it takes longer than so small a copy.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None
