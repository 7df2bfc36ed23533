"""What a rank passes to a save: its parts of named global tensors, and a JSON document.

Each part is a box of a named global tensor, never "the file of rank r". This is why any number of ranks can load a
checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, index
from typing import Any, TypeAlias

import torch

from hpctrain.checkpoint.format.boxes import Box, boxes_of_range
from hpctrain.checkpoint.format.dtypes import check_plain, dtype_name
from hpctrain.distributed import ElementShard, box_of, is_first_replica, is_sharded_tensor, local_part
from hpctrain.errors import CheckpointError

SEPARATOR = "::"  # between the name of a parameter or value and the keys of the tensors that belong to it


@dataclass(frozen=True, kw_only=True, eq=False)
class Replicated:
    """A tensor that every rank holds whole, with the same bits. Each rank writes a part of the tensor.

    A save compares the ranks' copies according to `SaveOptions.replica_check`. For tensors whose values may differ
    between ranks, such as the running statistics of batch normalisation, use `FromRank0`.

    Attributes:
        name: Name of the tensor in the checkpoint.
        tensor: The values, on any device. Dtype and shape must be the same on every rank.
    """

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class FromRank0:
    """A tensor of which rank 0's values are saved, since the values may differ between ranks.

    Rank 0 writes all of it, and correspondingly fewer bytes of the replicated tensors.

    Attributes:
        name: Name of the tensor in the checkpoint.
        tensor: This rank's values, on any device. Every rank must list the tensor, with the same dtype and shape.
    """

    name: str
    tensor: torch.Tensor


def tensor_items(name: str, tensor: torch.Tensor) -> list[Item]:
    """Returns the items by which a `State` saves a tensor under the name `name`.

    For a plain tensor this is one `Replicated`. For a DTensor it is a `TensorShard` of this rank's part, or nothing if
    the part is empty, or if another rank holds and saves the same part.
    """
    if not is_sharded_tensor(tensor):
        return [Replicated(name=name, tensor=tensor.detach())]
    part = local_part(tensor.detach())
    if not part.numel() or not is_first_replica(tensor):
        return []
    return [TensorShard(name=name, tensor=part, global_shape=tuple(tensor.shape), offset=box_of(tensor)[0])]


def element_items(name: str, part: torch.Tensor, *, shard: ElementShard) -> list[Item]:
    """Returns the shards by which a `State` saves `part`, if ranks hold ranges of a flattened parameter.

    `part` contains this rank's elements of the parameter, or of a tensor that belongs to it, such as an optimizer's
    moment. `shard` says which range of the flattened parameter this rank holds. A range consists of at most a few boxes
    (rectangular regions). Each box becomes one `TensorShard` of a tensor with the parameter's shape. `part` has the
    shape of `shard.part` (perhaps empty), or any other shape if it describes the parameter as a whole, such as an
    optimizer's step counter. Such a tensor is saved by the rank that holds the parameter's first element.
    """
    if part.shape != shard.part.shape:
        offset = (0,) * part.dim()
        whole = TensorShard(name=name, tensor=part, global_shape=tuple(part.shape), offset=offset)
        return [whole] if shard.begin == 0 else []
    items: list[Item] = []
    values, begin = part.detach().reshape(-1), 0
    places = [shard.dims.index(dim) for dim in range(len(shard.dims))]
    for box in boxes_of_range(shard.memory_shape, start=shard.begin, stop=shard.end):
        tensor = values[begin : begin + box.num_elems].view(box.shape).permute(places)
        offset = tuple(box.offset[place] for place in places)
        items.append(TensorShard(name=name, tensor=tensor, global_shape=shard.shape, offset=offset))
        begin += box.num_elems
    return items


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorShard:
    """This rank's box of a global tensor: `tensor` lies at `offset` in an array of `global_shape`.

    The shards of all ranks together must hold every element exactly once. A rank may have none, one, or several
    shards of the same tensor, and a shard may be empty.

    Attributes:
        name: Name of the global tensor in the checkpoint.
        tensor: The elements of the box, on any device; same number of dimensions as the global tensor.
        global_shape: Shape of the global tensor; the same on every rank.
        offset: Index of the box's first element in the global tensor, one number per dimension.
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(offset=tuple(self.offset), shape=tuple(self.tensor.shape))


Item: TypeAlias = Replicated | FromRank0 | TensorShard


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """One rank's part of the content of a checkpoint.

    Attributes:
        items: The tensors. Every rank must list the same `Replicated` and `FromRank0` tensors, in any order; the
            shards are this rank's own.
        document: JSON object, the same on every rank, for everything that is not a tensor: schedule, position in
            the data, loss scale, recipe, environment and so on.
        parent: Step and id of the checkpoint from which the run resumed, or None; the same on every rank.
    """

    items: Sequence[Item]
    document: Mapping[str, Any] = field(default_factory=dict)
    parent: Mapping[str, Any] | None = None

    def sources(self) -> list[Item]:
        """Returns the items in a fixed order: `Replicated` and `FromRank0` items sorted by name, then the shards."""
        listed = [item for item in self.items if not isinstance(item, TensorShard)]
        shards = [item for item in self.items if isinstance(item, TensorShard)]
        return [*sorted(listed, key=attrgetter("name")), *shards]

    def from_rank_0(self) -> State:
        """Returns a copy of the state in which every `Replicated` item is a `FromRank0` item.

        A save of the copy stores rank 0's values of these tensors.
        """
        items = [
            FromRank0(name=item.name, tensor=item.tensor) if isinstance(item, Replicated) else item
            for item in self.items
        ]
        return replace(self, items=items)


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Name, dtype, shape and kind of one tensor that is saved. This is all that is needed to plan a save."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the global tensor
    box: Box | None  # the shard's box; None: every rank lists the whole tensor
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
    """Returns the header of an item of a `State`: its name, dtype, shape and kind, without content.

    Raises CheckpointError for a shard that does not lie inside its global tensor, and for a tensor that is not
    plain strided memory (sparse, quantized, meta).
    """
    check_plain(item.tensor)
    dtype = dtype_name(item.tensor.dtype)
    if not isinstance(item, TensorShard):
        return Header(
            name=item.name, dtype=dtype, shape=tuple(item.tensor.shape), box=None,
            from_rank_0=isinstance(item, FromRank0),
        )  # fmt: skip
    try:  # to int: numpy's integers cannot be encoded as JSON
        shape, offset = tuple(map(index, item.global_shape)), tuple(map(index, item.offset))
    except TypeError as error:
        raise CheckpointError(
            f"shard of {item.name!r}: offset and global_shape must be integers, not {item.offset!r} and "
            f"{item.global_shape!r}"
        ) from error
    box = Box(offset=offset, shape=tuple(item.tensor.shape))
    if not box.lies_within(shape):
        raise CheckpointError(f"shard of {item.name!r}: {box} does not lie inside shape {list(shape)}")
    return Header(name=item.name, dtype=dtype, shape=shape, box=box)


def encode_document(document: Mapping[str, Any]) -> str:
    """Returns the document as canonical JSON text: sorted keys, no spaces.

    Raises CheckpointError if the document contains values that JSON cannot represent.
    """
    try:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint's document must be JSON (dicts with text keys, lists, numbers, text): {error}"
        ) from error
    return text
