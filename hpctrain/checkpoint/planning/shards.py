"""Which shards each rank holds, checked; in a short form where all ranks hold as many rows. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from hpctrain.checkpoint.format.boxes import Box, Steps, TooFragmentedError, cover_exactly
from hpctrain.checkpoint.format.state import Header
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class EvenShards(Sequence[Sequence[Header]]):
    """The shards of all ranks, as headers, where rank r holds the rows from n r to before n (r + 1) of each tensor.

    Such are the states of the ranks' generators. They need no check, and a rank needs to know only the first rank's.
    """

    first: tuple[Header, ...]
    num_ranks: int

    @classmethod
    def of(cls, headers: Sequence[Header], *, rank: int, num_ranks: int) -> EvenShards | None:
        """Returns the shards of all ranks if those of this rank are even; None if they are not."""
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
        return [replace(header, box=rows_of(header, rank=rank)) for header in self.first]


def rows_of(header: Header, *, rank: int) -> Box:
    """Returns the box that a rank holds of an even tensor, whose first rank's header is given."""
    assert header.box is not None
    return Box(offset=(rank * header.box.shape[0], *header.box.offset[1:]), shape=header.box.shape)


def check_shards(
    shards_by_rank: Sequence[Sequence[Header]], *, replicated_names: set[str]
) -> dict[str, Header]:
    """Returns one header per sharded tensor. Raises CheckpointError unless its shards agree and cover it exactly."""
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
        raise CheckpointError(f"{name!r} is sharded on rank {rank} and also replicated", agreed=True)
