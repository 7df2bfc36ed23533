"""The write plan: which rank writes which bytes. Pure, with the same result on every rank.

The replicated tensors, concatenated in the order of their names, are divided into one part of equal size per rank.
Tensors of kind `FromRank0` are written by rank 0, whose part is smaller by their size. Shards are written by the rank
that holds them. Each rank writes to one file; if there are several, the bytes of a tensor that the ranks of one file
write form a piece of the tensor, which is a dataset of that file. Pieces are divided into extents of at most
EXTENT_BYTES, the unit of hashing: to read one byte of an extent, all of it must be verified.

Extents and pieces are computed on request only: a rank requests its own extents and the pieces of its own file; rank 0,
which writes the metadata, requests all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.boxes import Box, split_box, whole
from hpctrain.checkpoint.format.dtypes import dtype_named
from hpctrain.checkpoint.format.link_names import dataset_path
from hpctrain.checkpoint.format.state import Header
from hpctrain.checkpoint.planning.division import Division
from hpctrain.checkpoint.planning.shards import EvenShards, check_shards, rows_of
from hpctrain.errors import CheckpointError

EXTENT_BYTES = 4 << 20

# A piece: the index of its tensor in the plan, and its number among the tensor's pieces.
PieceKey: TypeAlias = tuple[int, int]


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

    @property
    def elem_bytes(self) -> int:
        return dtype_named(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.elem_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """A box of a tensor that one rank writes, with one hash.

    tensor: index in the plan's tensors. piece: number of the tensor's piece. source: index in `State.sources()` of the
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

    order: the ranks, file by file, shape (num_ranks,). first: position in `order` of each file's first rank, and at the
    end num_ranks, shape (count + 1,). leaders: for each file the rank that creates it, the lowest that writes to it.
    """

    of_rank: tuple[int, ...]
    order: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    first: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    leaders: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        files = np.array(self.of_rank, dtype=np.int64)
        order = np.argsort(files, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(files))])
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "first", first)
        object.__setattr__(self, "leaders", tuple(order[first[:-1]].tolist()))

    @property
    def count(self) -> int:
        return len(self.leaders)

    def ranks_of(self, file: int) -> NDArray[np.int64]:
        """Returns the ranks that write to a file, ascending, shape (number of ranks,), int64."""
        return self.order[self.first[file] : self.first[file + 1]]

    def position_of(self, rank: int) -> int:
        """Returns the position of a rank in `order`."""
        file = self.of_rank[rank]
        return int(self.first[file] + np.searchsorted(self.ranks_of(file), rank))


class WritePlan:
    """See `make_plan`. tensors: sorted by name."""

    def __init__(
        self,
        *,
        tensors: Sequence[PlannedTensor],
        replicated: Sequence[Header],
        shards_by_rank: Sequence[Sequence[Header]],
        files: Files,
    ) -> None:
        """Do not call this; use `make_plan`, which checks the arguments."""
        self.tensors = tuple(tensors)
        self.files = files
        self._replicated = replicated
        self._shards = shards_by_rank
        self._index = {tensor.name: index for index, tensor in enumerate(self.tensors)}
        self._ahead = [source for source, header in enumerate(replicated) if header.from_rank_0]
        # The sources to divide, and the tensors that they are.
        self._line = [source for source, header in enumerate(replicated) if not header.from_rank_0]
        self._line_tensors = [self._index[replicated[source].name] for source in self._line]
        self._division = Division(
            [(self.tensors[t].num_bytes, self.tensors[t].elem_bytes) for t in self._line_tensors],
            num_parts=self.num_ranks,
            ahead_bytes=sum(self.tensors[self._index[replicated[s].name]].num_bytes for s in self._ahead),
        )

    @property
    def num_ranks(self) -> int:
        return len(self._shards)

    def bytes_of(self, rank: int) -> int:
        """Returns the number of bytes that `rank` writes."""
        return sum(e.box.num_elems * self.tensors[e.tensor].elem_bytes for e in self.extents_of(rank))

    def extents_of(self, rank: int) -> list[Extent]:
        """Returns the extents that `rank` writes."""
        extents: list[Extent] = []

        def add(tensor: int, piece: int, box: Box, *, source: int, start: int) -> None:
            for part in split_box(box, max_elems=EXTENT_BYTES // self.tensors[tensor].elem_bytes):
                extents.append(
                    Extent(tensor=tensor, piece=piece, box=part, source=source, source_start=start)
                )
                start += part.num_elems

        for source in self._ahead if rank == 0 else ():
            tensor = self._index[self._replicated[source].name]
            add(tensor, 0, whole(self.tensors[tensor].view), source=source, start=0)
        file = self.files.of_rank[rank]
        for place, begin, end in self._division.pieces(self.files.position_of(rank)):
            box = Box(offset=(begin,), shape=(end - begin,))
            piece = 0 if self.files.count == 1 else self._division.number_of_run(file, place, ends=self._ends)
            add(self._line_tensors[place], piece, box, source=self._line[place], start=begin)
        for place, header in enumerate(self._shards[rank]):
            assert header.box is not None
            if header.box.num_elems:
                source = len(self._replicated) + place
                add(
                    self._index[header.name],
                    self._shard_piece(rank, place),
                    header.box,
                    source=source,
                    start=0,
                )
        return extents

    def pieces_in(self, file: int) -> dict[PieceKey, PlannedPiece]:
        """Returns the pieces that one file holds, in the order of tensors and pieces."""
        found = {}
        for (tensor, number), nth, box in sorted(self._boxes_in(file)):
            planned = self.tensors[tensor]
            found[tensor, number] = PlannedPiece(
                file=file, dataset=dataset_path(planned.name, number=nth), box=box,
                shape=planned.shape if box == whole(planned.view) else box.shape,
            )  # fmt: skip
        return found

    def pieces(self) -> list[list[PlannedPiece]]:
        """Returns all pieces of each tensor, in order."""
        found: list[dict[int, PlannedPiece]] = [{} for _ in self.tensors]
        for file in range(self.files.count):
            for (tensor, number), piece in self.pieces_in(file).items():
                found[tensor][number] = piece
        return [[pieces[number] for number in sorted(pieces)] for pieces in found]

    def _boxes_in(self, file: int) -> Iterator[tuple[PieceKey, int, Box]]:
        """Yields the file's pieces: the key, its number among the tensor's pieces in this file, and the box."""
        if self.files.count == 1:
            yield from (((t, 0), 0, whole(tensor.view)) for t, tensor in enumerate(self.tensors))
            return
        if file == self.files.of_rank[0]:
            for source in self._ahead:
                tensor = self._index[self._replicated[source].name]
                if self.tensors[tensor].num_bytes:
                    yield (tensor, 0), 0, whole(self.tensors[tensor].view)
        if file == 0:  # tensors without elements are written by no rank
            empty = (t for t, tensor in enumerate(self.tensors) if not tensor.num_bytes)
            yield from (((tensor, 0), 0, whole(self.tensors[tensor].view)) for tensor in empty)
        for place, begin, end in self._division.pieces_of_run(file, ends=self._ends):
            number = self._division.number_of_run(file, place, ends=self._ends)
            yield (self._line_tensors[place], number), 0, Box(offset=(begin,), shape=(end - begin,))
        if isinstance(self._shards, EvenShards):
            ranks = self.files.ranks_of(file).tolist()
            for header in self._shards.first:
                for nth, rank in enumerate(ranks):
                    yield (self._index[header.name], rank), nth, rows_of(header, rank=rank)
        else:
            yield from self._listed_shards[1].get(file, ())

    def _shard_piece(self, rank: int, place: int) -> int:
        if self.files.count == 1:
            return 0
        return rank if isinstance(self._shards, EvenShards) else self._listed_shards[0][rank, place]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """Offsets in the concatenated replicated tensors, in bytes, at which the part of each file ends; shape (number
        of files,)."""
        return self._division.boundaries(self.files.first[1:])

    @cached_property
    def _listed_shards(
        self,
    ) -> tuple[dict[tuple[int, int], int], dict[int, list[tuple[PieceKey, int, Box]]]]:
        """The number of the piece of each (rank, place), and the pieces of each file as `_boxes_in` yields them."""
        numbers: dict[tuple[int, int], int] = {}
        by_file: dict[int, list[tuple[PieceKey, int, Box]]] = defaultdict(list)
        of_tensor: dict[int, int] = defaultdict(int)
        in_file: dict[tuple[int, int], int] = defaultdict(int)
        for rank, shards in enumerate(self._shards):
            file = self.files.of_rank[rank]
            for place, header in enumerate(shards):
                assert header.box is not None
                if not header.box.num_elems:
                    continue
                tensor = self._index[header.name]
                numbers[rank, place] = of_tensor[tensor]
                by_file[file].append(((tensor, of_tensor[tensor]), in_file[tensor, file], header.box))
                of_tensor[tensor] += 1
                in_file[tensor, file] += 1
        return numbers, by_file


def make_plan(
    *,
    replicated: Sequence[Header],
    shards_by_rank: Sequence[Sequence[Header]],
    file_of_rank: Sequence[int] | None = None,
) -> WritePlan:
    """Returns the plan for all ranks. The arguments must be the same on every rank.

    replicated: the tensors that every rank lists, `Replicated` and `FromRank0`, sorted by name. shards_by_rank: each
    rank's shards, in its own order; as `EvenShards` if possible, since otherwise the plan takes time and memory in
    proportion to the number of ranks. file_of_rank: number of the file that each rank writes to, from 0 without gaps;
    None: one file for all. Raises CheckpointError, on every rank, if a name occurs twice, or if shards of a tensor are
    inconsistent or do not cover it exactly.
    """
    replicated_names = {header.name for header in replicated}
    if len(replicated_names) != len(replicated):
        names = [header.name for header in replicated]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"more than one replicated tensor is called {_quoted(twice)}", agreed=True)
    sharded = check_shards(shards_by_rank, replicated_names=replicated_names)
    tensors = [
        *(PlannedTensor(name=h.name, dtype=h.dtype, shape=h.shape, view=(math.prod(h.shape),)) for h in replicated),
        *(PlannedTensor(name=h.name, dtype=h.dtype, shape=h.shape, view=h.shape) for h in sharded.values()),
    ]  # fmt: skip
    num_ranks = len(shards_by_rank)
    return WritePlan(
        tensors=sorted(tensors, key=lambda tensor: tensor.name), replicated=replicated, shards_by_rank=shards_by_rank,
        files=Files(of_rank=(0,) * num_ranks if file_of_rank is None else tuple(file_of_rank)),
    )  # fmt: skip


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
