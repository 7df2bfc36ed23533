"""Where every byte of a checkpoint goes, agreed by all ranks; kept from one save to the next.

A run saves the same tensors again and again. As long as no rank's tensors have changed in name, dtype or shape,
one small vote replaces planning, laying out and telling. Before it a rank looks at the tensors that it writes; at
those that only others write it can look while the disk works: if one is otherwise than theirs, it is an error.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.agree_plan import agree_on_plan, document_hash
from hpctrain.checkpoint.dtypes import dtype_name
from hpctrain.checkpoint.metadata import Metadata, encode_header
from hpctrain.checkpoint.metadata_text import TensorsText, room_for, tensors_text
from hpctrain.checkpoint.own_bytes import OwnBytes, own_bytes
from hpctrain.checkpoint.plan import Files, WritePlan
from hpctrain.checkpoint.seal import empty_part_block
from hpctrain.checkpoint.skeleton import Skeleton, SkeletonDataset, make_skeleton
from hpctrain.checkpoint.state import Replicated, Shard, State
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Collective
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """What is left of a plan. skeleton: of this rank's file, where this rank is its leader. text: on rank 0. own: what
    this rank writes. others: replicated tensors that only others write."""

    files: Files
    skeleton: Skeleton | None
    text: TensorsText | None
    own: OwnBytes
    others: _Kinds

    def check_others(self, sources: Sequence[Replicated | Shard]) -> None:
        """Not collective. Raises CheckpointError where a tensor that only other ranks write is otherwise here."""
        found = self.others.now(sources)
        if found == self.others:
            return
        kinds = zip(self.others.numbers, found.each(), self.others.each(), strict=True)
        number, here, there = next(entry for entry in kinds if entry[1] != entry[2])
        raise CheckpointError(
            f"the ranks' replicated tensors differ: {sources[number].name!r} is {here} on this rank, {there} on those "
            "that write it"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kinds:
    """What the layout depends on of the sources with these numbers. Lists, not an object each: there may be
    thousands."""

    numbers: Sequence[int]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[torch.Size]
    layouts: Sequence[torch.layout]

    @classmethod
    def of(cls, sources: Sequence[Replicated | Shard], numbers: Sequence[int]) -> _Kinds:
        tensors = [sources[number].tensor for number in numbers]
        return cls(
            numbers=numbers, dtypes=[t.dtype for t in tensors], shapes=[t.shape for t in tensors],
            layouts=[t.layout for t in tensors],
        )  # fmt: skip

    def now(self, sources: Sequence[Replicated | Shard]) -> _Kinds:
        """Of the sources with the same numbers."""
        return _Kinds.of(sources, self.numbers)

    def each(self) -> Iterator[str]:
        for dtype, shape, layout in zip(self.dtypes, self.shapes, self.layouts, strict=True):
            yield f"{dtype_name(dtype)} {list(shape)}" + ("" if layout is torch.strided else f" ({layout})")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Remembered:
    """number: counts a communicator's layouts, the same on all of its ranks. frame: all else that the layout depends
    on. kinds: of all tensors but `layout.others`."""

    number: int
    frame: list[Any]
    kinds: _Kinds
    layout: Layout

    def fits(self, sources: Sequence[Replicated | Shard], *, frame: list[Any], also_others: bool) -> bool:
        return (
            self.frame == frame
            and self.kinds.now(sources) == self.kinds
            and not (also_others and self.layout.others.now(sources) != self.layout.others)
        )


# The last layouts of each communicator, newest last: what a function of the state's names and shapes once gave.
_LAST: weakref.WeakKeyDictionary[Collective, list[_Remembered]] = weakref.WeakKeyDictionary()
_REMEMBERED = 2  # a run saves one kind of state, or all of it and its weights


def layout_for(
    state: State,
    *,
    sources: Sequence[Replicated | Shard],
    step: int,
    comm: Collective,
    file_of_rank: Sequence[int],
    alignment: int,
    header: Metadata,
    others_later: bool = False,
) -> Layout:
    """The layout of this save. Collective.

    sources: `state.sources()`. alignment: bytes, of large datasets. header: the metadata but for its tensors, parts
    and hashes; rank 0's counts. others_later: the caller calls `check_others` later, before the save is finished.
    Raises CheckpointError on every rank when the ranks' states do not belong together (with others_later some of that
    is left to `check_others`), or HDF5 cannot hold them.
    """
    frame = _frame(sources, file_of_rank=file_of_rank, alignment=alignment)
    remembered = _LAST.setdefault(comm, [])
    fitting = {
        entry.number: entry.layout
        for entry in remembered
        if entry.fits(sources, frame=frame, also_others=not others_later)
        and (comm.rank != 0 or _has_room(entry.layout, header=header))
    }
    try:
        mine = document_hash(state)
    except CheckpointError:  # told by `agree_on_plan`
        fitting, mine = {}, ""
    vote = json.dumps([sorted(fitting), step, mine]).encode()
    votes = [json.loads(data) for data in comm.all_gather_bytes(vote)]
    # What fits on all ranks fits: of each tensor those that write it have looked at it.
    common = set(fitting).intersection(*(numbers for numbers, *_ in votes))
    if common and all(rest == votes[0][1:] for _, *rest in votes):
        return fitting[max(common)]
    plan = agree_on_plan(state, step=step, comm=comm, file_of_rank=file_of_rank)
    layout = _lay_out(plan, sources=sources, comm=comm, alignment=alignment, header=header)
    others = set(layout.others.numbers)
    kinds = _Kinds.of(sources, [number for number in range(len(sources)) if number not in others])
    number = remembered[-1].number + 1 if remembered else 0
    del remembered[: -(_REMEMBERED - 1)]
    remembered.append(_Remembered(number=number, frame=frame, kinds=kinds, layout=layout))
    return layout


def _frame(
    sources: Sequence[Replicated | Shard], *, file_of_rank: Sequence[int], alignment: int
) -> list[Any]:
    return [
        alignment,
        tuple(file_of_rank),
        [s.name for s in sources],
        [(s.offset, s.global_shape) for s in sources if isinstance(s, Shard)],
    ]


def _others(plan: WritePlan, *, sources: Sequence[Replicated | Shard], rank: int) -> list[int]:
    """Numbers of the replicated sources that some ranks write, and this one does not."""
    num_replicated = sum(isinstance(source, Replicated) for source in sources)
    by_rank = [{extent.source for extent in extents} for extents in plan.extents_by_rank]
    return sorted(
        number for number in set().union(*by_rank) - by_rank[rank] if number < num_replicated
    )  # the replicated come first, with the same numbers on every rank


def _has_room(layout: Layout, *, header: Metadata) -> bool:
    """Whether rank 0's metadata fits where it was. What is wrong with it is told by `_lay_out`, on all ranks."""
    assert layout.text is not None
    assert layout.skeleton is not None
    try:
        needed = room_for(_encoded(header), layout.text, num_parts=layout.files.count)
    except CheckpointError:
        return False
    return needed <= layout.skeleton.metadata_bytes


def _encoded(header: Metadata) -> dict[str, Any]:
    return encode_header(header, byte_order=sys.byteorder)


def _lay_out(
    plan: WritePlan, *, sources: Sequence[Replicated | Shard], comm: Collective, alignment: int,
    header: Metadata,
) -> Layout:  # fmt: skip
    """Collective."""
    file = plan.files.of_rank[comm.rank]
    leads = plan.files.leader_of(file) == comm.rank

    def lead() -> tuple[Skeleton | None, TensorsText | None]:
        text = tensors_text(plan) if comm.rank == 0 else None
        if not leads:
            return None, text
        room = 0 if text is None else room_for(_encoded(header), text, num_parts=plan.files.count)
        block = b"" if file == 0 else empty_part_block()
        datasets = _datasets(plan, file=file)
        return make_skeleton(datasets, metadata_bytes=room, user_block=block, alignment=alignment), text

    skeleton, text = agreed(comm, lead, os_error=CheckpointError)
    told = comm.all_gather_bytes(np.array(skeleton.offsets if skeleton else [], dtype=np.int64).tobytes())
    by_file = [
        iter(np.frombuffer(told[plan.files.leader_of(number)], dtype=np.int64).tolist())
        for number in range(plan.files.count)
    ]
    offsets = [[next(by_file[piece.file]) for piece in tensor.pieces] for tensor in plan.tensors]
    if text is not None:
        text = text.with_offsets([offset for places in offsets for offset in places])
    return Layout(
        files=plan.files, skeleton=skeleton, text=text, own=own_bytes(plan, rank=comm.rank, offsets=offsets),
        others=_Kinds.of(sources, _others(plan, sources=sources, rank=comm.rank)),
    )  # fmt: skip


def _datasets(plan: WritePlan, *, file: int) -> list[SkeletonDataset]:
    return [
        SkeletonDataset(
            path=piece.dataset, dtype=tensor.dtype, shape=piece.shape,
            num_bytes=piece.box.num_elems * tensor.elem_bytes,
        )
        for tensor in plan.tensors
        for piece in tensor.pieces
        if piece.file == file
    ]  # fmt: skip
