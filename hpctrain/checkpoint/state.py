"""What a rank hands over to be saved: pieces of named global tensors, and one JSON document.

State is addressed as boxes of named global tensors, never as "rank 3's file", so that any number of ranks
can load it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, index
from typing import Any

import torch

from hpctrain.checkpoint.boxes import Box
from hpctrain.checkpoint.dtypes import check_plain, dtype_name
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, eq=False)
class Replicated:
    """A tensor that every rank holds whole. The ranks share the work of writing it.

    Every rank's content must be the same bits: each rank writes its part of the bytes, and nobody compares.
    """

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """This rank's box of a global tensor: `tensor` lies at `offset` in an array of `global_shape`.

    The shards of all ranks together hold every element exactly once. A rank may have none, one, or several
    shards of one name, and a shard may be empty.
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(offset=tuple(self.offset), shape=tuple(self.tensor.shape))


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """All that one checkpoint holds, as one rank sees it.

    items: every rank lists the same replicated tensors, in any order; shards are this rank's own.
    document: JSON with text keys, the same on every rank: schedule, position in the data, loss scale,
    recipe, environment, ...
    parent: the checkpoint that the run went on from, its step and id; the same on every rank.
    """

    items: Sequence[Replicated | Shard]
    document: Mapping[str, Any] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None

    def sources(self) -> list[Replicated | Shard]:
        """The items in the order in which the write plan counts them: replicated by name, then shards."""
        replicated = [item for item in self.items if isinstance(item, Replicated)]
        shards = [item for item in self.items if isinstance(item, Shard)]
        return [*sorted(replicated, key=attrgetter("name")), *shards]


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What the plan must know of one item: everything but the content."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the global tensor
    box: Box | None  # None: replicated

    def to_json(self) -> list[Any]:
        place = None if self.box is None else [list(self.box.offset), list(self.box.shape)]
        return [self.name, self.dtype, list(self.shape), place]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Header:
        name, dtype, shape, place = value
        box = None if place is None else Box(offset=tuple(place[0]), shape=tuple(place[1]))
        return cls(name=name, dtype=dtype, shape=tuple(shape), box=box)

    def describe(self) -> str:
        kind = "replicated" if self.box is None else "sharded"
        return f"{kind} {self.dtype} {list(self.shape)}"


def header_of(item: Replicated | Shard) -> Header:
    """Raises CheckpointError for a shard that does not lie inside its global tensor, and for a tensor that is not
    plain memory."""
    check_plain(item.tensor)
    dtype = dtype_name(item.tensor.dtype)
    if isinstance(item, Replicated):
        return Header(name=item.name, dtype=dtype, shape=tuple(item.tensor.shape), box=None)
    try:  # numpy's whole numbers are no JSON
        shape, offset = tuple(map(index, item.global_shape)), tuple(map(index, item.offset))
    except TypeError as error:
        raise CheckpointError(
            f"shard of {item.name!r}: its place is whole numbers, not offset {item.offset!r} in shape "
            f"{item.global_shape!r}"
        ) from error
    box = Box(offset=offset, shape=tuple(item.tensor.shape))
    if not box.lies_within(shape):
        raise CheckpointError(f"shard of {item.name!r}: {box} does not lie inside shape {list(shape)}")
    return Header(name=item.name, dtype=dtype, shape=shape, box=box)


def encode_document(document: Mapping[str, Any]) -> str:
    """Canonical JSON text of the document. Raises CheckpointError when it is not JSON."""
    try:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint's document must be JSON (dicts with text keys, lists, numbers, text): {error}"
        ) from error
    return text
