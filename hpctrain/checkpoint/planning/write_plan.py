"""The write plan: which rank writes which bytes. Pure, with the same result on every rank.

The replicated tensors, concatenated in the order of their names, are divided into one part of equal size per rank.
Tensors of kind `FromRank0` are written by rank 0, whose part is smaller by their size. Shards are written by the
rank that holds them.

Each rank writes to one file. The bytes of a tensor in one file form a piece of the tensor, which is a dataset of
that file. Pieces are divided into extents of at most EXTENT_BYTES, the unit of hashing: to read one byte of an
extent, all of it must be verified.

Extents and pieces are computed on request only: a rank requests its own extents and the pieces of its own file;
rank 0, which writes the metadata, requests all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.boxes import (
    Box,
    Steps,
    TooFragmentedError,
    cover_exactly,
    split_box,
    whole_box,
)
from hpctrain.checkpoint.format.dtypes import dataset_path, dtype_named
from hpctrain.checkpoint.format.state import Header
from hpctrain.errors import CheckpointError

# The shards of each rank, checked; in a short form if all ranks hold the same number of rows. Pure.


@dataclass(frozen=True, slots=True)
class EvenShards(Sequence[Sequence[Header]]):
    """The shards of all ranks, if every rank holds the same number n of rows of each sharded tensor, in rank order.

    Rank r then holds rows n r to n (r + 1) - 1. The states of the ranks' random generators are an example. The shards
    are headers, without content. Such shards need no check, and a rank needs to know only the shards of the first rank.
    """

    first: tuple[Header, ...]
    num_ranks: int

    @classmethod
    def of(cls, headers: Sequence[Header], *, rank: int, num_ranks: int) -> EvenShards | None:
        """Derives the shards of all ranks from the shards of rank `rank`; returns None if that is impossible.

        It is possible if the shards are even: rank r holds rows n r to n (r + 1) - 1 of each tensor, with the same n on
        every rank.
        """
        first = []
        for header in headers:
            if header.box is None or not header.shape or len(header.box.offset) != len(header.shape):
                return None
            num_rows = header.box.shape[0]
            begin = (0,) * len(header.shape)
            expected = Box(offset=(rank * num_rows, *begin[1:]), shape=(num_rows, *header.shape[1:]))
            if header.box != expected or not expected.num_elems or num_rows * num_ranks != header.shape[0]:
                return None
            first.append(replace(header, box=replace(expected, offset=begin)))
        if len({header.name for header in first}) != len(first):
            return None
        return cls(tuple(first), num_ranks)

    def __len__(self) -> int:
        return self.num_ranks

    @overload
    def __getitem__(self, rank: int) -> Sequence[Header]: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Sequence[Header]]: ...
    def __getitem__(self, rank: int | slice) -> Sequence[Header] | Sequence[Sequence[Header]]:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(self.num_ranks))]
        if not 0 <= rank < self.num_ranks:
            raise IndexError(rank)
        return [replace(header, box=even_box(header, rank=rank)) for header in self.first]


def even_box(header: Header, *, rank: int) -> Box:
    """Returns the box of a tensor that `rank` holds, if every rank holds the same number of rows, in rank order.

    `header` describes the part of the first rank.
    """
    assert header.box is not None
    return Box(offset=(rank * header.box.shape[0], *header.box.offset[1:]), shape=header.box.shape)


def check_shards(
    shards_by_rank: Sequence[Sequence[Header]], *, replicated_names: set[str]
) -> dict[str, Header]:
    """Checks the shards of all ranks, and returns one header (name, dtype and shape) per sharded tensor.

    Raises CheckpointError unless the shards of each tensor agree in dtype and shape and together hold every element
    exactly once.
    """
    if isinstance(shards_by_rank, EvenShards):
        for header in shards_by_rank.first:
            _check_name(header.name, rank=0, replicated_names=replicated_names)
        return {header.name: header for header in shards_by_rank.first}
    first: dict[str, Header] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for rank, header in _with_ranks(shards_by_rank):
        name = header.name
        _check_name(name, rank=rank, replicated_names=replicated_names)
        known = first.setdefault(name, header)
        if (known.dtype, known.shape) != (header.dtype, header.shape):
            holder = next(r for r, other in _with_ranks(shards_by_rank) if other.name == name)
            raise CheckpointError(
                f"shards of {name!r} disagree: {known.describe()} on rank {holder}, "
                f"{header.describe()} on rank {rank}",
                agreed=True,
            )
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
                f"{len(boxes[name])} shards hold {held} elements, the tensor has {math.prod(header.shape)}",
                agreed=True,
            )
    return first


def _with_ranks(shards_by_rank: Sequence[Sequence[Header]]) -> Iterator[tuple[int, Header]]:
    return ((rank, header) for rank, shards in enumerate(shards_by_rank) for header in shards)


def _check_name(name: str, *, rank: int, replicated_names: set[str]) -> None:
    if name in replicated_names:
        raise CheckpointError(
            f"{name!r} is sharded on rank {rank} and also replicated: list it one way", agreed=True
        )


# Division of the replicated tensors' bytes into one part of equal size per rank. Pure.
#
# A part is computed from its number alone, so that a rank of ten thousand plans its own part and no other.


# Parts are divided inside a tensor only at multiples of this. Large datasets begin at a page, and a page written by two
# nodes is slow or even corrupted on network filesystems. A multiple of every element size.
CUT_BYTES = 4096


class Division:
    """The concatenated bytes of tensors, divided into `num_parts` parts of about equal size.

    Each part is written by one rank. The rank of part 0 also writes `ahead_bytes` other bytes, which count toward its
    share. If `ahead_bytes` is at most an equal share of all bytes, every share differs from an equal share by less than
    CUT_BYTES.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], *, num_parts: int, ahead_bytes: int = 0) -> None:
        """`sizes` contains (number of bytes, bytes per element) of each tensor.

        `ahead_bytes` is the number of other bytes that the rank of part 0 also writes. Part 0 is smaller by as many
        bytes, and may be empty.
        """
        self._elem_bytes = [elem_bytes for _, elem_bytes in sizes]
        self._begins = list(accumulate((num_bytes for num_bytes, _ in sizes), initial=0))
        self._num_parts = num_parts
        total_bytes = self._begins[-1]
        self._first_bytes = max(0, (total_bytes + ahead_bytes) // num_parts - ahead_bytes)
        self._rest_bytes = total_bytes - self._first_bytes

    def pieces(self, part: int) -> Iterator[tuple[int, int, int]]:
        """Yields (tensor, start, stop) for each tensor that has elements in the part of index `part`.

        The elements in the part are start <= i < stop of the flattened tensor; `tensor` is the index of the tensor.
        """
        return self._pieces_between(self._boundary(part), self._boundary(part + 1))

    def pieces_of_run(self, run: int, *, ends: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Yields (tensor, start, stop) for each tensor that has elements in a run of successive parts.

        For example, the parts in one file form a run. The elements are start <= i < stop of the flattened tensor of
        index `tensor`. `run` is the index of the run. `ends` contains the byte positions in the concatenated tensors at
        which the runs end: shape (num_runs,).
        """
        return self._pieces_between(int(ends[run - 1]) if run else 0, int(ends[run]))

    def number_of_run(self, run: int, tensor: int, *, ends: NDArray[np.int64]) -> int:
        """Returns how many runs of parts before run `run` contain elements of the tensor of index `tensor`.

        A run consists of successive parts, such as the parts in one file. Run `run` itself must contain elements of the
        tensor. `ends` contains the byte positions in the concatenated tensors at which the runs end: shape (num_runs,).
        """
        first, begin = self._begins[tensor], int(ends[run - 1]) if run else 0
        if begin <= first:
            return 0
        inside = ends[np.searchsorted(ends, first, side="right") : np.searchsorted(ends, begin, side="right")]
        return len(np.unique(inside))

    def _pieces_between(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        tensor = bisect_right(self._begins, begin) - 1
        while begin < end:
            base, elem_bytes = self._begins[tensor], self._elem_bytes[tensor]
            stop = min(end, self._begins[tensor + 1])
            if stop > begin:
                yield tensor, (begin - base) // elem_bytes, (stop - base) // elem_bytes
            begin, tensor = stop, tensor + 1

    def _boundary(self, part: int) -> int:
        """Returns the byte position in the concatenated tensors at which the part of index `part` begins."""
        if part == 0:
            return 0
        if part == self._num_parts:
            return self._begins[-1]
        cut = self._first_bytes + (part - 1) * self._rest_bytes // (self._num_parts - 1)
        return cut - (cut - self._begins[bisect_right(self._begins, cut) - 1]) % CUT_BYTES

    def boundaries(self, parts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the byte positions, in the concatenated tensors, at which the parts of indices `parts` begin.

        The result has the shape and dtype of `parts`. The position of part `num_parts` is the end of the tensors.
        """
        if self._num_parts == 1:
            return np.where(parts == 0, 0, self._begins[-1])
        begins = np.array(self._begins, dtype=np.int64)
        # The product of part and bytes may exceed 64 bits, those of quotient and remainder do not.
        whole, rest = divmod(self._rest_bytes, self._num_parts - 1)
        cuts = self._first_bytes + (parts - 1) * whole + (parts - 1) * rest // (self._num_parts - 1)
        cuts[parts == 0], cuts[parts == self._num_parts] = 0, self._begins[-1]
        return cuts - (cuts - begins[np.searchsorted(begins, cuts, side="right") - 1]) % CUT_BYTES


# The write plan.


EXTENT_BYTES = 4 << 20

# A piece: the index of its tensor in the plan, and its number among the tensor's pieces.
PieceKey: TypeAlias = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPiece:
    """An HDF5 dataset that a save will write, with a part of a tensor.

    The elements are those of `box`, a rectangular region of an array of shape `PlannedTensor.view`, and have the shape
    `shape` in the dataset. `file` is the index of the file.
    """

    file: int
    dataset: str
    box: Box
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """A tensor that a save will write.

    The pieces of the tensor (one HDF5 dataset each) and its extents (regions with one hash each) are boxes (rectangular
    regions) of an array of shape `view`, which has the same elements.

    For replicated tensors `view` is `(num_elems,)`, so that an extent can be any range of elements; for sharded tensors
    `view` is the tensor's own shape.
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
    """A box (rectangular region) of a tensor that one rank writes, and that is hashed as a whole.

    Attributes:
        tensor: Index of the tensor in the plan.
        piece: Index of the HDF5 dataset that contains the extent, among the datasets (pieces) of the tensor.
        box: The elements, as a box of an array of shape `PlannedTensor.view`.
        source: Index of the tensor among those that the writing rank passes to the save (`State.sources()`).
        source_start: Position of the extent's first element in that tensor, flattened in row-major order. The extent is
            contiguous in the flattened tensor.
    """

    tensor: int
    piece: int
    box: Box
    source: int
    source_start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Which rank writes to which file.

    Attributes:
        of_rank: For each rank, the index of the file that it writes to. The indices start at 0, without gaps.
        order: The ranks, file by file: int64, shape (num_ranks,).
        first: For each file, the position of its first rank in `order`; the last entry is num_ranks: int64, shape
            (count + 1,).
        leaders: For each file, the rank that creates it: the lowest rank that writes to it.
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
        """Returns the ranks that write to a file, ascending: int64, shape (number of such ranks,)."""
        return self.order[self.first[file] : self.first[file + 1]]

    def position_of(self, rank: int) -> int:
        """Returns the position of a rank in `order`, the list of ranks sorted by file."""
        file = self.of_rank[rank]
        return int(self.first[file] + np.searchsorted(self.ranks_of(file), rank))


class WritePlan:
    """Which rank writes which bytes of which tensor; the tensors are sorted by name. Create it with `make_plan`."""

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
        # The sources whose bytes are divided among the ranks, and the indices of their tensors.
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
        """Returns the extents (regions of tensors that are hashed as a whole) that `rank` writes."""
        extents: list[Extent] = []

        def add(tensor: int, piece: int, box: Box, *, source: int, start: int) -> None:
            for part in split_box(box, max_elems=EXTENT_BYTES // self.tensors[tensor].elem_bytes):
                extents.append(
                    Extent(tensor=tensor, piece=piece, box=part, source=source, source_start=start)
                )
                start += part.num_elems

        for source in self._ahead if rank == 0 else ():
            tensor = self._index[self._replicated[source].name]
            add(tensor, 0, whole_box(self.tensors[tensor].view), source=source, start=0)
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
        """Returns the pieces (HDF5 datasets with parts of tensors) in one file, in the order of tensors and pieces."""
        found = {}
        for (tensor, number), nth, box in sorted(self._boxes_in(file)):
            planned = self.tensors[tensor]
            found[tensor, number] = PlannedPiece(
                file=file, dataset=dataset_path(planned.name, number=nth), box=box,
                shape=planned.shape if box == whole_box(planned.view) else box.shape,
            )  # fmt: skip
        return found

    def pieces(self) -> list[list[PlannedPiece]]:
        """Returns all pieces (HDF5 datasets) of each tensor, in order."""
        found: list[dict[int, PlannedPiece]] = [{} for _ in self.tensors]
        for file in range(self.files.count):
            for (tensor, number), piece in self.pieces_in(file).items():
                found[tensor][number] = piece
        return [[pieces[number] for number in sorted(pieces)] for pieces in found]

    def _boxes_in(self, file: int) -> Iterator[tuple[PieceKey, int, Box]]:
        """Yields three values for each piece (an HDF5 dataset with a part of a tensor) in the file of index `file`.

        These are the key of the piece (indices of tensor and piece), its index among the tensor's pieces in this file,
        and its box (the elements).
        """
        if self.files.count == 1:
            yield from (((t, 0), 0, whole_box(tensor.view)) for t, tensor in enumerate(self.tensors))
            return
        if file == self.files.of_rank[0]:
            for source in self._ahead:
                tensor = self._index[self._replicated[source].name]
                if self.tensors[tensor].num_bytes:
                    yield (tensor, 0), 0, whole_box(self.tensors[tensor].view)
        if file == 0:  # tensors without elements are written by no rank
            empty = (t for t, tensor in enumerate(self.tensors) if not tensor.num_bytes)
            yield from (((tensor, 0), 0, whole_box(self.tensors[tensor].view)) for tensor in empty)
        for place, begin, end in self._division.pieces_of_run(file, ends=self._ends):
            number = self._division.number_of_run(file, place, ends=self._ends)
            yield (self._line_tensors[place], number), 0, Box(offset=(begin,), shape=(end - begin,))
        if isinstance(self._shards, EvenShards):
            ranks = self.files.ranks_of(file).tolist()
            for header in self._shards.first:
                for nth, rank in enumerate(ranks):
                    yield (self._index[header.name], rank), nth, even_box(header, rank=rank)
        else:
            yield from self._listed_shards[1].get(file, ())

    def _shard_piece(self, rank: int, place: int) -> int:
        if self.files.count == 1:
            return 0
        return rank if isinstance(self._shards, EvenShards) else self._listed_shards[0][rank, place]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """For each file, the byte position in the concatenated replicated tensors at which the file's part ends.

        The shape is (num_files,).
        """
        return self._division.boundaries(self.files.first[1:])

    @cached_property
    def _listed_shards(
        self,
    ) -> tuple[dict[tuple[int, int], int], dict[int, list[tuple[PieceKey, int, Box]]]]:
        """Two dicts: (rank, index of the rank's shard) -> index of the shard's piece, and file -> pieces in the file.

        A piece is an HDF5 dataset with a part of a tensor. The pieces in a file are given as `_boxes_in` yields them.
        """
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
    """Returns the plan of a save: which rank writes which bytes of which tensor.

    The arguments must be the same on every rank.

    Args:
        replicated: The tensors of kind `Replicated` or `FromRank0`, which every rank lists, sorted by name.
        shards_by_rank: The shards of each rank, in the order in which the rank lists them. Pass an `EvenShards` if
            possible, since otherwise the plan takes time and memory in proportion to the number of ranks.
        file_of_rank: For each rank, the index of the file that it writes to; the indices start at 0, without gaps.
            None: one file for all ranks.

    Raises:
        CheckpointError: If a name occurs twice, or if the shards of a tensor are inconsistent or do not hold every
            element exactly once.
    """
    replicated_names = {header.name for header in replicated}
    if len(replicated_names) != len(replicated):
        names = [header.name for header in replicated]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(
            f"more than one replicated tensor is called {_quoted(twice)}: give each another name", agreed=True
        )
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
    """Returns in words how the ranks' lists of replicated tensors differ, for an error message."""
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
