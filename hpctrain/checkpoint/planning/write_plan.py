"""The write plan: which rank writes which bytes. Pure, with the same result on every rank.

The replicated tensors, concatenated in the order of their names, are divided into one part of equal size per rank.
Tensors of kind `FromRank0` are written by rank 0, whose part is smaller by their size. Shards are written by the rank
that holds them. Each rank writes to one file; if there are several, the bytes of a tensor that the ranks of one file
write form a piece of the tensor, which is a dataset of that file. Pieces are divided into extents of at most
EXTENT_BYTES, the unit of hashing: to read one byte of an extent, all of it must be verified.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.checkpoint.format.boxes import Box, Steps, TooFragmentedError, cover_exactly, split_box, whole
from hpctrain.checkpoint.format.dtypes import dtype_named
from hpctrain.checkpoint.format.link_names import dataset_path
from hpctrain.checkpoint.format.state import Header
from hpctrain.errors import CheckpointError

EXTENT_BYTES = 4 << 20

# The parts of two ranks are divided inside a tensor only at multiples of this. Large datasets begin at a page, and a
# page written by two nodes is slow or even corrupted on network filesystems. A multiple of every element size.
CUT_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPiece:
    """One dataset: the elements of `box`, a box of the tensor's view. shape: shape of the dataset."""

    file: int
    dataset: str
    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """A tensor. Its pieces and extents are boxes of an array of shape `view`, which has the same elements.

    view: `(num_elems,)` for replicated tensors, so that an extent can be any range of elements; the tensor's own shape
    for sharded ones.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    pieces: tuple[PlannedPiece, ...]

    @property
    def elem_bytes(self) -> int:
        return dtype_named(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.elem_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A box of a tensor that one rank writes, with one hash.

    tensor: index in the plan's tensors. piece: index in the tensor's pieces. source: index in `State.sources()` of the
    writing rank. source_start: first element in that source's row-major memory, where the extent is contiguous.
    """

    tensor: int
    piece: int
    box: Box
    source: int
    source_start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """of_rank: number of the file that each rank writes to; numbers start at 0, without gaps.

    leaders: for each file the rank that creates it, which is the lowest one that writes to it.
    """

    of_rank: tuple[int, ...]
    leaders: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lowest: dict[int, int] = {}
        for rank, file in enumerate(self.of_rank):
            lowest.setdefault(file, rank)
        object.__setattr__(self, "leaders", tuple(lowest[file] for file in range(len(lowest))))

    @property
    def count(self) -> int:
        return len(self.leaders)


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePlan:
    tensors: tuple[PlannedTensor, ...]  # sorted by name
    extents_by_rank: tuple[tuple[Extent, ...], ...]
    files: Files

    def bytes_of(self, rank: int) -> int:
        """Returns the number of bytes that `rank` writes."""
        return sum(e.box.num_elems * self.tensors[e.tensor].elem_bytes for e in self.extents_by_rank[rank])


def make_plan(
    *,
    replicated: Sequence[Header],
    shards_by_rank: Sequence[Sequence[Header]],
    file_of_rank: Sequence[int] | None = None,
) -> WritePlan:
    """Returns the plan for all ranks. The arguments must be the same on every rank.

    replicated: the tensors that every rank lists, `Replicated` and `FromRank0`, sorted by name. shards_by_rank: each
    rank's shards, in its own order. file_of_rank: number of the file that each rank writes to, from 0 without gaps;
    None: one file for all. Raises CheckpointError, on every rank, if a name occurs twice, or if shards of a tensor are
    inconsistent or do not cover it exactly.
    """
    num_ranks = len(shards_by_rank)
    files = tuple(file_of_rank) if file_of_rank is not None else (0,) * num_ranks
    replicated_names = {header.name for header in replicated}
    if len(replicated_names) != len(replicated):
        names = [header.name for header in replicated]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"more than one replicated tensor is called {_quoted(twice)}", agreed=True)
    sharded = _shapes_of_shards(shards_by_rank, replicated_names)
    planning = _Planning(files=files, whole_datasets=max(files) == 0)
    # Parts are assigned file by file, so that the bytes of a tensor in one file are contiguous in the tensor.
    order = sorted(range(num_ranks), key=lambda rank: (files[rank], rank))
    tensors = sorted(
        [*(_Tensor(header, view=(math.prod(header.shape),)) for header in replicated),
         *(_Tensor(header, view=header.shape) for header in sharded.values())],
        key=lambda tensor: tensor.header.name,
    )  # fmt: skip
    index = {tensor.header.name: i for i, tensor in enumerate(tensors)}
    ahead_bytes = 0
    line: list[int] = []  # indices of the sources to divide
    for source, header in enumerate(replicated):
        tensor = tensors[index[header.name]]
        if header.from_rank_0:
            ahead_bytes += tensor.num_bytes
            planning.add(
                0,
                tensor=tensor,
                number=index[header.name],
                box=whole(tensor.view),
                source=source,
                source_start=0,
            )
        else:
            line.append(source)
    flat = [tensors[index[replicated[source].name]] for source in line]
    for piece in divide_evenly(
        [(t.num_bytes, t.elem_bytes) for t in flat], num_ranks=num_ranks, ahead_bytes=ahead_bytes
    ):
        box = Box(offset=(piece.start,), shape=(piece.stop - piece.start,))
        planning.add(
            order[piece.rank], tensor=flat[piece.tensor], number=index[flat[piece.tensor].header.name], box=box,
            source=line[piece.tensor], source_start=piece.start,
        )  # fmt: skip
    for rank, shards in enumerate(shards_by_rank):
        for place, header in enumerate(shards):
            assert header.box is not None
            number = index[header.name]
            planning.add(
                rank, tensor=tensors[number], number=number, box=header.box,
                source=len(replicated) + place, source_start=0,
            )  # fmt: skip
    return WritePlan(
        tensors=tuple(tensor.planned() for tensor in tensors),
        extents_by_rank=tuple(tuple(planning.extents[rank]) for rank in range(num_ranks)),
        files=Files(of_rank=files),
    )


class _Tensor:
    """A tensor while its pieces are being collected."""

    def __init__(self, header: Header, *, view: tuple[int, ...]) -> None:
        self.header = header
        self.view = view
        self.elem_bytes = dtype_named(header.dtype).itemsize
        self.num_bytes = math.prod(header.shape) * self.elem_bytes
        self.pieces: list[tuple[int, Box]] = []

    def planned(self) -> PlannedTensor:
        """Returns the planned tensor. The dataset of a whole tensor has its shape; a part of a replicated one has one
        dimension."""
        pieces, seen = [], dict[int, int]()
        for file, box in self.pieces or [(0, whole(self.view))]:
            number = seen[file] = seen.get(file, -1) + 1
            shape = self.header.shape if box == whole(self.view) else box.shape
            dataset = dataset_path(self.header.name, number=number)
            pieces.append(PlannedPiece(file=file, dataset=dataset, box=box, shape=shape))
        return PlannedTensor(
            name=self.header.name, dtype=self.header.dtype, shape=self.header.shape, view=self.view,
            pieces=tuple(pieces),
        )  # fmt: skip


class _Planning:
    """Collects the ranks' extents and the pieces that contain them."""

    def __init__(self, *, files: tuple[int, ...], whole_datasets: bool) -> None:
        self.extents: list[list[Extent]] = [[] for _ in files]
        self._files = files
        self._whole = whole_datasets

    def add(
        self, rank: int, *, tensor: _Tensor, number: int, box: Box, source: int, source_start: int
    ) -> None:
        """Adds extents by which `rank` writes `box` of the tensor's view, from element `source_start` of its source."""
        if not box.num_elems:
            return
        piece = self._piece_of(tensor, file=self._files[rank], box=box)
        for part in split_box(box, max_elems=EXTENT_BYTES // tensor.elem_bytes):
            self.extents[rank].append(
                Extent(tensor=number, piece=piece, box=part, source=source, source_start=source_start)
            )
            source_start += part.num_elems

    def _piece_of(self, tensor: _Tensor, *, file: int, box: Box) -> int:
        """Returns the index of the piece for `box`. With one file a tensor is one piece. With several, neighbouring
        parts of a replicated tensor in the same file are one piece, and each shard is a piece."""
        if self._whole:
            tensor.pieces = [(0, whole(tensor.view))]
            return 0
        if tensor.pieces and tensor.header.box is None:
            last_file, last = tensor.pieces[-1]
            if last_file == file:
                joined = Box(offset=last.offset, shape=(last.shape[0] + box.shape[0],))
                tensor.pieces[-1] = (file, joined)
                return len(tensor.pieces) - 1
        tensor.pieces.append((file, box))
        return len(tensor.pieces) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPiece:
    """Elements start <= i < stop of the flattened tensor number `tensor`, written by `rank`."""

    rank: int
    tensor: int
    start: int
    stop: int


def divide_evenly(
    sizes: Sequence[tuple[int, int]], *, num_ranks: int, ahead_bytes: int = 0
) -> Iterator[TensorPiece]:
    """Divides the concatenation of tensors of `sizes`, (bytes, bytes per element), into equal parts for the ranks.

    ahead_bytes: other bytes that rank 0 writes; its part is smaller by them, and may be empty. If `ahead_bytes` is at
    most an equal share, every rank's share differs from that by less than CUT_BYTES.
    """
    total_bytes = sum(num_bytes for num_bytes, _ in sizes)
    first_bytes = max(0, (total_bytes + ahead_bytes) // num_ranks - ahead_bytes)
    rest_bytes = total_bytes - first_bytes
    rank, begin = 0, 0  # `begin`: position of the tensor in the concatenation, in bytes
    for tensor, (num_bytes, elem_bytes) in enumerate(sizes):
        start = 0
        while start < num_bytes:
            if rank + 1 < num_ranks:
                cut = first_bytes + rank * rest_bytes // (num_ranks - 1) - begin
                stop = num_bytes if cut >= num_bytes else max(start, cut - cut % CUT_BYTES)
            else:
                cut, stop = num_bytes, num_bytes
            if stop > start:
                yield TensorPiece(
                    rank=rank, tensor=tensor, start=start // elem_bytes, stop=stop // elem_bytes
                )
            if cut <= num_bytes and rank + 1 < num_ranks:
                rank += 1
            start = stop
        begin += num_bytes


def _shapes_of_shards(
    shards_by_rank: Sequence[Sequence[Header]], replicated_names: set[str]
) -> dict[str, Header]:
    """Returns one header per sharded tensor. Raises CheckpointError unless its shards agree and cover it exactly."""
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
    """Returns the differences of the ranks' lists of replicated tensors, for an error message."""
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
