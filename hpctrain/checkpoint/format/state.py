"""What a rank hands over to be saved: pieces of named global tensors, and one JSON document.

State is addressed as boxes of named global tensors, never as "rank 3's file", so that any number of ranks
can load it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, index
from typing import Any, TypeAlias

import torch

from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.dtypes import check_plain, dtype_name
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, eq=False)
class Replicated:
    """A tensor that every rank holds whole, with the same bits. The ranks share the work of writing it.

    A save compares the ranks' copies as `SaveOptions.replica_check` says. Where a rank's copy may differ, as the
    running statistics of batch normalisation do, use `FromRank0`.
    """

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class FromRank0:
    """A tensor of which every rank has one of its own, with the same name, dtype and shape: rank 0's is saved.

    Rank 0 writes all of it, and that much less of the replicated tensors.
    """

    name: str
    tensor: torch.Tensor


def model_items(model: torch.nn.Module, *, prefix: str = "") -> list[Item]:
    """The entries of `model.state_dict()`, named `prefix` and their key: parameters as `Replicated`, everything else
    (buffers, such as running statistics) as `FromRank0`. The tensors are the model's own, not copies.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [
        (Replicated if name in parameters else FromRank0)(name=f"{prefix}{name}", tensor=tensor.detach())
        for name, tensor in model.state_dict().items()
    ]


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


Item: TypeAlias = Replicated | FromRank0 | Shard


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """All that one checkpoint holds, as one rank sees it.

    items: every rank lists the same tensors as replicated, and the same as rank 0's, in any order; shards are this
    rank's own.
    document: JSON with text keys, the same on every rank: schedule, position in the data, loss scale,
    recipe, environment, ...
    parent: the checkpoint that the run went on from, its step and id; the same on every rank.
    """

    items: Sequence[Item]
    document: Mapping[str, Any] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None

    def sources(self) -> list[Item]:
        """The items in the order in which the write plan counts them: those that every rank lists by name, then
        shards."""
        listed = [item for item in self.items if not isinstance(item, Shard)]
        shards = [item for item in self.items if isinstance(item, Shard)]
        return [*sorted(listed, key=attrgetter("name")), *shards]

    def from_rank_0(self) -> State:
        """The same with every replicated tensor as rank 0 has it."""
        items = [
            FromRank0(name=item.name, tensor=item.tensor) if isinstance(item, Replicated) else item
            for item in self.items
        ]
        return replace(self, items=items)


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What the plan must know of one item: everything but the content."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the global tensor
    box: Box | None  # of a shard; None: every rank lists the whole tensor
    from_rank_0: bool = False

    def to_json(self) -> list[Any]:
        place = None if self.box is None else [list(self.box.offset), list(self.box.shape)]
        return [self.name, self.dtype, list(self.shape), place, self.from_rank_0]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Header:
        name, dtype, shape, place, from_rank_0 = value
        box = None if place is None else Box(offset=tuple(place[0]), shape=tuple(place[1]))
        return cls(name=name, dtype=dtype, shape=tuple(shape), box=box, from_rank_0=from_rank_0)

    def describe(self) -> str:
        kind = "sharded" if self.box is not None else "rank 0's" if self.from_rank_0 else "replicated"
        return f"{kind} {self.dtype} {list(self.shape)}"


def header_of(item: Item) -> Header:
    """Raises CheckpointError for a shard that does not lie inside its global tensor, and for a tensor that is not
    plain memory."""
    check_plain(item.tensor)
    dtype = dtype_name(item.tensor.dtype)
    if not isinstance(item, Shard):
        return Header(
            name=item.name, dtype=dtype, shape=tuple(item.tensor.shape), box=None,
            from_rank_0=isinstance(item, FromRank0),
        )  # fmt: skip
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
