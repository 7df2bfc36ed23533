"""The bytes that one rank writes: taken from its tensors, copied if asked, hashed on their way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from hpctrain.checkpoint.boxes import Box, runs_of
from hpctrain.checkpoint.dtypes import byte_view
from hpctrain.checkpoint.plan import WritePlan
from hpctrain.checkpoint.state import Replicated, Shard

# Small tensors are taken by the shortest way, and copied many by one call: their calls cost more than their bytes.
_SMALL_BYTES = 1 << 16
_JOINED_BYTES = 4 << 20
_JOINABLE = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Extents that follow each other in one source. start, num_bytes: of the source's row-major memory.
    extents: numbers of the rank's extents, first and one beyond the last."""

    source: int
    start: int
    num_bytes: int
    extents: tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnBytes:
    """What one rank writes to its file. extent_bytes: of each of its extents, in the plan's order. runs: of each
    extent, (offset in the file, number of bytes) of its stretches, in the order of its bytes."""

    segments: tuple[Segment, ...]
    extent_bytes: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.extent_bytes)

    def stretches(
        self, content: Iterator[tuple[Segment, memoryview]], *, hashes: NDArray[np.uint64]
    ) -> Iterator[tuple[int, memoryview]]:
        """(offset in the file, bytes) of all content. Each extent is hashed, into `hashes`, just before its
        bytes are handed out: they are in the processor's cache when they are written."""
        digest, sizes, runs = xxhash.xxh3_64_intdigest, self.extent_bytes, self.runs
        for segment, data in content:
            position, (first, stop) = 0, segment.extents
            if stop == first + 1 and len(runs[first]) == 1:  # a small tensor: one of thousands, perhaps
                hashes[first] = digest(data)
                yield runs[first][0][0], data
                continue
            for number in range(first, stop):
                extent = data[position : position + sizes[number]]
                position += sizes[number]
                hashes[number] = digest(extent)
                begin = 0
                for offset, num_bytes in runs[number]:
                    yield offset, extent[begin : begin + num_bytes]
                    begin += num_bytes


def own_bytes(plan: WritePlan, *, rank: int, offsets: Sequence[Sequence[int]]) -> OwnBytes:
    """The plan of one rank, with places in the file. offsets: of each tensor's pieces."""
    extent_bytes: list[int] = []
    runs: list[tuple[tuple[int, int], ...]] = []
    segments: list[Segment] = []
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
        last = segments[-1] if segments else None
        if last is not None and last.source == extent.source and last.start + last.num_bytes == start:
            segments[-1] = Segment(
                source=last.source, start=last.start, num_bytes=last.num_bytes + num_bytes,
                extents=(last.extents[0], number + 1),
            )  # fmt: skip
        else:
            segments.append(
                Segment(source=extent.source, start=start, num_bytes=num_bytes, extents=(number, number + 1))
            )
    segments.sort(key=lambda segment: runs[segment.extents[0]][0][0])  # as they lie in the file
    return OwnBytes(segments=tuple(segments), extent_bytes=tuple(extent_bytes), runs=tuple(runs))


def content_of(sources: Sequence[Replicated | Shard], own: OwnBytes) -> Iterator[tuple[Segment, memoryview]]:
    """Each segment's bytes, straight from the tensors. A tensor that is not contiguous, or not in the host's
    memory, is brought there piece by piece; a device's small tensors are brought many at once."""
    on_host = all(source.tensor.is_cpu for source in sources)
    for batch in ([segment] for segment in own.segments) if on_host else _batches(sources, own.segments):
        if len(batch) > 1:
            joined, position = _joined(sources, batch).cpu().numpy().data, 0
            for segment in batch:
                yield segment, joined[position : position + segment.num_bytes]
                position += segment.num_bytes
            continue
        (segment,) = batch
        tensor = sources[segment.source].tensor
        if segment.num_bytes < _SMALL_BYTES:  # there may be thousands of them
            data = _view_of(tensor)
            if data is not None and data.nbytes == segment.num_bytes:
                yield segment, data
                continue
        view = byte_view(tensor)[segment.start : segment.start + segment.num_bytes]
        if view.device.type == "cpu":
            yield segment, view.numpy().data
        else:
            yield from _brought(view, segment, own)


def _view_of(tensor: torch.Tensor) -> memoryview | None:
    """The bytes of a tensor that numpy knows and that lies in one run of the host's memory; None for others."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    try:
        return plain.numpy().data.cast("B")
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ):  # another device, a type of torch's own, not contiguous, 0-d
        return None


def copy_to(buffer: torch.Tensor, sources: Sequence[Replicated | Shard], own: OwnBytes) -> None:
    """Copy all of this rank's bytes, segment after segment, into `buffer`, bytes on the host. From a device the
    copies are queued on its present stream: wait for it before the buffer is read or a tensor is changed."""
    position = 0
    for batch in _batches(sources, own.segments):
        num_bytes = sum(segment.num_bytes for segment in batch)
        target = buffer[position : position + num_bytes]
        position += num_bytes
        if len(batch) > 1:
            target.copy_(_joined(sources, batch), non_blocking=True)
            continue
        (segment,) = batch
        view = byte_view(sources[segment.source].tensor)
        target.copy_(view[segment.start : segment.start + segment.num_bytes], non_blocking=True)


def content_in(buffer: torch.Tensor, own: OwnBytes) -> Iterator[tuple[Segment, memoryview]]:
    """Each segment's bytes out of a buffer that `copy_to` filled."""
    data, position = buffer.numpy().data, 0
    for segment in own.segments:
        yield segment, data[position : position + segment.num_bytes]
        position += segment.num_bytes


def _batches(sources: Sequence[Replicated | Shard], segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments one by one, but neighbouring small tensors of one kind together."""
    batch: list[Segment] = []
    kind, batch_bytes = None, 0
    for segment in segments:
        tensor = sources[segment.source].tensor
        mine = None
        if segment.num_bytes < _SMALL_BYTES and segment.num_bytes == tensor.nbytes:
            mine = (tensor.dtype, tensor.device) if tensor.dtype in _JOINABLE else None
        if batch and (mine is None or mine != kind or batch_bytes + segment.num_bytes > _JOINED_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(segment)
        kind, batch_bytes = mine, batch_bytes + segment.num_bytes
        if mine is None:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def _joined(sources: Sequence[Replicated | Shard], batch: Sequence[Segment]) -> torch.Tensor:
    """The bytes of whole tensors of one dtype on one device, one after the other."""
    tensors = [sources[segment.source].tensor for segment in batch]
    with torch.no_grad():
        return torch.cat([t if t.dim() == 1 else t.reshape(-1) for t in tensors]).view(torch.uint8)


def _brought(view: torch.Tensor, segment: Segment, own: OwnBytes) -> Iterator[tuple[Segment, memoryview]]:
    """A device's bytes, extent by extent: the host never holds a second copy of a large tensor."""
    position = 0
    for number in range(*segment.extents):
        num_bytes = own.extent_bytes[number]
        part = Segment(
            source=segment.source, start=segment.start + position, num_bytes=num_bytes,
            extents=(number, number + 1),
        )  # fmt: skip
        yield part, view[position : position + num_bytes].cpu().numpy().data
        position += num_bytes
