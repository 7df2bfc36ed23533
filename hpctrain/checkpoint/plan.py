"""Who writes which bytes: pure, and the same result on every rank.

Replicated tensors are laid end to end in the order of their names, and this line is cut into as many equal
parts as there are ranks. Shards are written by the rank that holds them. Everything is then cut into extents
of at most EXTENT_BYTES, the unit of hashing: whoever reads one byte of an extent verifies all of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.checkpoint.boxes import Box, Steps, TooFragmentedError, cover_exactly, split_box
from hpctrain.checkpoint.dtypes import dtype_named
from hpctrain.checkpoint.state import Header
from hpctrain.errors import CheckpointError

EXTENT_BYTES = 4 << 20

# Two ranks meet inside a tensor only at a multiple of this: large datasets begin at a page, and a page that
# two nodes write is slow, or worse, on network filesystems. A multiple of every element's size.
CUT_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """One dataset. Its extents are boxes of an array of shape `view`, which has the same elements.

    view: `(num_elems,)` for replicated tensors, so that an extent is any range of the bytes; the tensor's own
    shape for sharded ones.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: tuple[int, ...]

    @property
    def elem_bytes(self) -> int:
        return dtype_named(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.elem_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Bytes that one rank writes and hashes as one.

    tensor: index into the plan's tensors. source: index into `State.sources()` of the rank that writes.
    source_start: first element in that source's row-major memory; the extent is contiguous there.
    """

    tensor: int
    box: Box
    source: int
    source_start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePlan:
    tensors: tuple[PlannedTensor, ...]  # sorted by name
    extents_by_rank: tuple[tuple[Extent, ...], ...]

    def bytes_of(self, rank: int) -> int:
        """Bytes that `rank` writes."""
        return sum(e.box.num_elems * self.tensors[e.tensor].elem_bytes for e in self.extents_by_rank[rank])


def make_plan(*, replicated: Sequence[Header], shards_by_rank: Sequence[Sequence[Header]]) -> WritePlan:
    """The plan for all ranks.

    replicated: sorted by name, the same on every rank. shards_by_rank: each rank's shards in its own order.
    Raises CheckpointError when a name is used twice, or when shards disagree or do not make up their tensor;
    as the input is the same on all ranks, all ranks raise.
    """
    replicated_names = {header.name for header in replicated}
    if len(replicated_names) != len(replicated):
        names = [header.name for header in replicated]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"more than one replicated tensor is called {_quoted(twice)}", agreed=True)
    sharded = _shapes_of_shards(shards_by_rank, replicated_names)
    tensors = sorted(
        [
            *(
                PlannedTensor(name=h.name, dtype=h.dtype, shape=h.shape, view=(math.prod(h.shape),))
                for h in replicated
            ),
            *(
                PlannedTensor(name=h.name, dtype=h.dtype, shape=h.shape, view=h.shape)
                for h in sharded.values()
            ),
        ],
        key=lambda tensor: tensor.name,
    )
    index = {tensor.name: i for i, tensor in enumerate(tensors)}
    extents_by_rank: list[list[Extent]] = [[] for _ in shards_by_rank]
    flat = [tensors[index[header.name]] for header in replicated]
    for piece in divide_evenly([(t.num_bytes, t.elem_bytes) for t in flat], num_ranks=len(shards_by_rank)):
        tensor = flat[piece.tensor]
        box = Box(offset=(piece.start,), shape=(piece.stop - piece.start,))
        for part in split_box(box, max_elems=EXTENT_BYTES // tensor.elem_bytes):
            extents_by_rank[piece.rank].append(
                Extent(tensor=index[tensor.name], box=part, source=piece.tensor, source_start=part.offset[0])
            )
    for rank, shards in enumerate(shards_by_rank):
        for place, header in enumerate(shards):
            tensor = tensors[index[header.name]]
            assert header.box is not None
            start = 0
            for part in split_box(header.box, max_elems=EXTENT_BYTES // tensor.elem_bytes):
                extents_by_rank[rank].append(
                    Extent(
                        tensor=index[tensor.name],
                        box=part,
                        source=len(replicated) + place,
                        source_start=start,
                    )
                )
                start += part.num_elems
    return WritePlan(
        tensors=tuple(tensors), extents_by_rank=tuple(tuple(extents) for extents in extents_by_rank)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Elements start <= i < stop of the flattened tensor number `tensor`, written by `rank`."""

    rank: int
    tensor: int
    start: int
    stop: int


def divide_evenly(sizes: Sequence[tuple[int, int]], *, num_ranks: int) -> Iterator[Piece]:
    """Lay tensors of `sizes` (bytes, bytes of an element) end to end and cut the line into equal parts.

    Every rank's share differs from the even one by less than CUT_BYTES.
    """
    total_bytes = sum(num_bytes for num_bytes, _ in sizes)
    rank, begin = 0, 0  # `begin`: where the tensor begins on the line
    for tensor, (num_bytes, elem_bytes) in enumerate(sizes):
        start = 0
        while start < num_bytes:
            if rank + 1 < num_ranks:
                cut = (rank + 1) * total_bytes // num_ranks - begin
                stop = num_bytes if cut >= num_bytes else max(start, cut - cut % CUT_BYTES)
            else:
                cut, stop = num_bytes, num_bytes
            if stop > start:
                yield Piece(rank=rank, tensor=tensor, start=start // elem_bytes, stop=stop // elem_bytes)
            if cut <= num_bytes and rank + 1 < num_ranks:
                rank += 1
            start = stop
        begin += num_bytes


def _shapes_of_shards(
    shards_by_rank: Sequence[Sequence[Header]], replicated_names: set[str]
) -> dict[str, Header]:
    """One header per sharded tensor, after checking that its shards agree and cover it exactly once."""
    first: dict[str, Header] = {}
    holder: dict[str, int] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for rank, shards in enumerate(shards_by_rank):
        for header in shards:
            name = header.name
            if name in replicated_names:
                raise CheckpointError(f"{name!r} is sharded on rank {rank} and also replicated", agreed=True)
            known = first.setdefault(name, header)
            if (known.dtype, known.shape) != (header.dtype, header.shape):
                raise CheckpointError(
                    f"shards of {name!r} disagree: {known.describe()} on rank {holder[name]}, "
                    f"{header.describe()} on rank {rank}",
                    agreed=True,
                )
            holder.setdefault(name, rank)
            assert header.box is not None
            if header.box.num_elems:
                boxes[name].append(header.box)
    steps = Steps()
    for name, header in first.items():
        try:
            covered = cover_exactly(boxes[name], shape=header.shape, steps=steps)
        except TooFragmentedError as error:
            raise CheckpointError(f"the shards of {name!r}: {error}", agreed=True) from error
        if not covered:
            held = sum(box.num_elems for box in boxes[name])
            raise CheckpointError(
                f"the shards of {name!r}, {list(header.shape)}, do not hold every element exactly once: "
                f"{held} elements in {len(boxes[name])} shards for {math.prod(header.shape)}",
                agreed=True,
            )
    return first


def explain_difference(replicated_by_rank: Sequence[Sequence[Header]]) -> str:
    """In words, how the ranks' lists of replicated tensors differ. For an error message."""
    by_rank: list[Mapping[str, str]] = [
        {h.name: h.describe() for h in headers} for headers in replicated_by_rank
    ]
    lines: list[str] = []
    for name in sorted(set().union(*by_rank)):
        ranks_by_text: dict[str, list[int]] = defaultdict(list)
        for rank, headers in enumerate(by_rank):
            ranks_by_text[headers.get(name, "missing")].append(rank)
        if len(ranks_by_text) > 1:
            texts = (f"{text} on rank {_listed(ranks)}" for text, ranks in ranks_by_text.items())
            lines.append(f"{name!r}: {', '.join(texts)}")
    shown = "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")
    return shown or "a name is listed more than once on some ranks"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
