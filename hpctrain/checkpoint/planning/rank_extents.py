"""The bytes that one rank writes: taken from its tensors, copied if asked, hashed on their way out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from hpctrain.checkpoint.files.direct_io import BLOCK_BYTES
from hpctrain.checkpoint.files.write_buffers import Staging
from hpctrain.checkpoint.format.boxes import Box, runs_of
from hpctrain.checkpoint.format.dtypes import byte_view
from hpctrain.checkpoint.format.state import Item
from hpctrain.checkpoint.planning.write_plan import WritePlan
from hpctrain.errors import CheckpointError

# Small tensors are taken many at once: their calls cost more than their bytes. So many that they stay in the
# processor's cache until they are written.
_SMALL_BYTES = 1 << 16
_JOINED_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Bytes of one source. start, num_bytes: of its row-major memory."""

    source: int
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What is taken in one go: one segment, or small ones that follow each other in the file.

    extents: numbers of the rank's extents that it holds, end to end. offset: where in the file it begins, if all of it
    follows each other there and is small; None: each extent has its runs.
    """

    segments: tuple[Segment, ...]
    extents: Sequence[int]
    num_bytes: int
    offset: int | None


# A group's bytes, as they are handed on. They are not changed until the save is finished; but of groups that are joined
# in memory of a `Staging` only until the next is asked for.
Content: TypeAlias = Iterator[tuple[Group, memoryview]]


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnBytes:
    """What one rank writes to its file. groups: as they lie in the file. extent_bytes: of each of its extents, in the
    plan's order. runs: of each extent, (offset in the file, number of bytes) of its stretches, in the order of its
    bytes."""

    groups: tuple[Group, ...]
    extent_bytes: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.extent_bytes)

    def stretches(self, content: Content, *, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, memoryview]]:
        """(offset in the file, bytes) of all content. Each extent is hashed, into `hashes`, just before its
        bytes are handed out: they are in the processor's cache when they are written."""
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


def own_bytes(plan: WritePlan, *, rank: int, offsets: Sequence[Sequence[int]]) -> OwnBytes:
    """The plan of one rank, with places in the file. offsets: of each tensor's pieces."""
    extent_bytes: list[int] = []
    runs: list[tuple[tuple[int, int], ...]] = []
    segments: list[tuple[Segment, range]] = []  # each with its extents
    for number, extent in enumerate(plan.extents_by_rank[rank]):
        tensor = plan.tensors[extent.tensor]
        piece = tensor.pieces[extent.piece]
        elem_bytes = tensor.elem_bytes
        num_bytes = extent.box.num_elems * elem_bytes
        start = extent.source_start * elem_bytes
        base = offsets[extent.tensor][extent.piece]
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


def laid_end_to_end(segments: Sequence[Segment]) -> OwnBytes:
    """The segments as if they were a file of their own, each an extent."""
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
) -> Iterator[Group]:
    small: list[Segment] = []
    extents: list[int] = []
    begin = end = 0
    for segment, numbers in segments:
        is_small = segment.num_bytes < _SMALL_BYTES and len(numbers) == 1 and len(runs[numbers[0]]) == 1
        offset = runs[numbers[0]][0][0]
        if small and (not is_small or offset != end or end + segment.num_bytes - begin > _JOINED_BYTES):
            yield Group(segments=tuple(small), extents=extents, num_bytes=end - begin, offset=begin)
            small, extents = [], []
        if not is_small:
            yield Group(segments=(segment,), extents=numbers, num_bytes=segment.num_bytes, offset=None)
            continue
        if not small:
            begin = end = offset
        small.append(segment)
        extents.append(numbers[0])
        end += segment.num_bytes
    if small:
        yield Group(segments=tuple(small), extents=extents, num_bytes=end - begin, offset=begin)


def content_of(
    sources: Sequence[Item], own: OwnBytes, *, groups: Iterable[Group], staging: Staging
) -> Content:
    """The bytes of each of `groups`, which are those of `own`; small tensors are joined in memory of `staging`. Large
    ones are handed out as they lie in memory; one that is not contiguous is made so, one of a device is brought to the
    host extent by extent: the host never holds a second copy of it."""
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
    """Copy all of this rank's bytes, group after group, into `buffer`, bytes on the host, `copy_bytes` of them.
    From a device the copies are queued on its present stream: wait for it before the buffer is read or a tensor is
    changed."""
    for group, position in zip(own.groups, _places(own), strict=True):
        _copy_group(buffer[position : position + group.num_bytes], sources, group, wait=False)


def content_in(buffer: torch.Tensor, own: OwnBytes) -> Content:
    """Each group's bytes out of a buffer that `copy_to` filled."""
    data = buffer.numpy().data
    for group, position in zip(own.groups, _places(own), strict=True):
        yield group, data[position : position + group.num_bytes]


def copy_bytes(own: OwnBytes) -> int:
    """Bytes of the buffer that `copy_to` fills."""
    end = 0
    for group, position in zip(own.groups, _places(own), strict=True):
        end = position + group.num_bytes
    return end


def _places(own: OwnBytes) -> Iterator[int]:
    """Where in a copy each group begins: large ones at the same byte of a block as in the file, so that they can be
    written as they lie."""
    position = 0
    for group in own.groups:
        if group.num_bytes >= _SMALL_BYTES and group.offset is None:
            position += (own.runs[group.extents[0]][0][0] - position) % BLOCK_BYTES
        yield position
        position += group.num_bytes


def _copy_group(target: torch.Tensor, sources: Sequence[Item], group: Group, *, wait: bool) -> None:
    """Into `target`, bytes on the host. What comes from a device comes at once where it can be, and is only queued if
    nobody waits."""
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
    """There may be thousands of them: a copy through torch takes several times as long. False, and some are not copied,
    where one is not on the host."""
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
                "is a wrapper of others. Save what it stands for"
            )
        _memmove(address, source + start, segment.num_bytes)
        address += segment.num_bytes
    return True


def view_of(sources: Sequence[Item], segment: Segment) -> torch.Tensor:
    """The segment's bytes, shape (num_bytes,), on the tensor's device. Of a tensor that is not contiguous only the
    rows that hold them are copied."""
    tensor, begin, end = sources[segment.source].tensor, segment.start, segment.start + segment.num_bytes
    if tensor.dim() and len(tensor) > 1 and not tensor.is_contiguous():
        row_bytes = tensor.nbytes // len(tensor)
        first = begin // row_bytes
        tensor = tensor[first : -(-end // row_bytes)]
        begin, end = begin - first * row_bytes, end - first * row_bytes
    return byte_view(tensor)[begin:end]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# PyDLL: keeps the interpreter's lock, which takes longer to give up and get back than to copy this little.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None
