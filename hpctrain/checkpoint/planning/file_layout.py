"""Where every byte of a checkpoint goes, agreed by all ranks; kept from one save to the next.

A run saves the same tensors again and again. As long as no rank's tensors have changed in name, dtype or shape,
one small vote replaces planning, laying out and telling. Names are compared before it. To look at each of thousands of
tensors takes as long as to write several megabytes, so dtypes and shapes are compared when the tensor is taken, while
the disk works already: where one has changed after all, the save begins anew.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.files.write_buffers import Staging
from hpctrain.checkpoint.format.commit_header import empty_part_block
from hpctrain.checkpoint.format.metadata import Metadata, encode_header
from hpctrain.checkpoint.format.state import FromRank0, Item, Shard, State
from hpctrain.checkpoint.planning.agree_plan import agree_on_plan, document_hash
from hpctrain.checkpoint.planning.hdf5_skeleton import Skeleton, SkeletonDataset, make_skeleton
from hpctrain.checkpoint.planning.metadata_template import TensorsText, room_for, tensors_text
from hpctrain.checkpoint.planning.rank_extents import Group, OwnBytes, own_bytes
from hpctrain.checkpoint.planning.replicas import Replicas
from hpctrain.checkpoint.planning.write_plan import Files, WritePlan
from hpctrain.comm.collectives.agreement import agreed
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CheckpointError


class NotAsPlannedError(CheckpointError):
    """A tensor has another dtype or shape than in the save before, for which the layout was made. Never shown: the save
    begins anew."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FileLayout:
    """What is left of a plan. skeleton: of this rank's file, where this rank is its leader. text: on rank 0. own: what
    this rank writes. kinds: of the sources of each of its groups, and last of those that are in none. replicas: what
    the ranks can compare."""

    files: Files
    skeleton: Skeleton | None
    text: TensorsText | None
    own: OwnBytes
    kinds: Sequence[_Kinds]
    replicas: Replicas

    def groups(self, sources: Sequence[Item], *, staging: Staging) -> Iterator[Group]:
        """The groups of `own`, each once its sources have been looked at; in the end, while the last of them is being
        written where a `staging` is made use of, the sources that are in none. Not collective. NotAsPlannedError."""
        *by_group, rest = self.kinds
        for group, kinds in zip(self.own.groups, by_group, strict=True):
            kinds.check(sources)
            yield group
        staging.write_now()
        rest.check(sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kinds:
    """What the layout depends on of the sources with these numbers. Lists, not an object each: there may be
    thousands."""

    numbers: Sequence[int]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[torch.Size]
    layouts: Sequence[torch.layout]

    @classmethod
    def of(cls, sources: Sequence[Item], numbers: Sequence[int]) -> _Kinds:
        tensors = [sources[number].tensor for number in numbers]
        return cls(
            numbers=numbers, dtypes=[t.dtype for t in tensors], shapes=[t.shape for t in tensors],
            layouts=[t.layout for t in tensors],
        )  # fmt: skip

    def fit(self, sources: Sequence[Item]) -> bool:
        """Whether the sources with the same numbers are so."""
        try:
            return _Kinds.of(sources, self.numbers) == self
        except RuntimeError:  # one without a shape, nested or lazy: planning tells
            return False

    def check(self, sources: Sequence[Item]) -> None:
        if not self.fit(sources):
            raise NotAsPlannedError("a tensor has changed its dtype or shape")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Remembered:
    """number: counts a communicator's layouts, the same on all of its ranks. frame: all but the kinds that the layout
    depends on."""

    number: int
    frame: list[Any]
    layout: FileLayout

    def fits(self, sources: Sequence[Item], *, frame: list[Any], trusting: bool) -> bool:
        return self.frame == frame and (trusting or all(kinds.fit(sources) for kinds in self.layout.kinds))


@dataclass(kw_only=True, eq=False)
class _Memory:
    """Of a communicator. layouts: the last ones, newest last: what a function of the state's names and shapes once
    gave. trusted: what has the same names has had the same kinds so far."""

    layouts: list[_Remembered] = field(default_factory=list)
    trusted: bool = True


_MEMORY: weakref.WeakKeyDictionary[Collective, _Memory] = weakref.WeakKeyDictionary()
_REMEMBERED = 2  # a run saves one kind of state, or all of it and its weights


def layout_for(
    state: State,
    *,
    sources: Sequence[Item],
    step: int,
    comm: Collective,
    file_of_rank: Sequence[int],
    alignment: int,
    header: Metadata,
    trusting: bool = False,
) -> FileLayout:
    """The layout of this save. Collective.

    sources: `state.sources()`. alignment: bytes, of large datasets. header: the metadata but for its tensors, parts
    and hashes; rank 0's counts. trusting: dtypes and shapes are not compared: the caller takes `FileLayout.groups`,
    and where that raises on any rank calls `distrust` and begins anew.
    Raises CheckpointError on every rank when the ranks' states do not belong together (with `trusting` this may be left
    to the second time), or HDF5 cannot hold them.
    """
    frame = _frame(sources, file_of_rank=file_of_rank, alignment=alignment)
    memory = _MEMORY.setdefault(comm, _Memory())
    fitting = {
        entry.number: entry.layout
        for entry in memory.layouts
        if entry.fits(sources, frame=frame, trusting=trusting and memory.trusted)
        and (comm.rank != 0 or _has_room(entry.layout, header=header))
    }
    try:
        mine = document_hash(state)
    except CheckpointError:  # told by `agree_on_plan`
        fitting, mine = {}, ""
    vote = json.dumps([sorted(fitting), step, mine]).encode()
    votes = [json.loads(data) for data in comm.all_gather_bytes(vote)]
    common = set(fitting).intersection(*(numbers for numbers, *_ in votes))
    if common and all(rest == votes[0][1:] for _, *rest in votes):
        return fitting[max(common)]
    plan = agree_on_plan(state, step=step, comm=comm, file_of_rank=file_of_rank)
    layout = _lay_out(plan, sources=sources, comm=comm, alignment=alignment, header=header)
    layouts = memory.layouts
    number = layouts[-1].number + 1 if layouts else 0
    layouts[:] = [*layouts[-(_REMEMBERED - 1) :], _Remembered(number=number, frame=frame, layout=layout)]
    return layout


def distrust(comm: Collective) -> None:
    """Look at dtypes and shapes before each save from now on. To be called on every rank."""
    _MEMORY.setdefault(comm, _Memory()).trusted = False


def _frame(sources: Sequence[Item], *, file_of_rank: Sequence[int], alignment: int) -> list[Any]:
    return [
        alignment,
        tuple(file_of_rank),
        [s.name for s in sources],
        [(s.offset, s.global_shape) for s in sources if isinstance(s, Shard)],
        [number for number, s in enumerate(sources) if isinstance(s, FromRank0)],
    ]


def _kinds(own: OwnBytes, *, sources: Sequence[Item]) -> list[_Kinds]:
    """See `FileLayout`."""
    numbers = [[segment.source for segment in group.segments] for group in own.groups]
    rest = sorted(set(range(len(sources))).difference(*numbers))
    return [_Kinds.of(sources, found) for found in (*numbers, rest)]


def _has_room(layout: FileLayout, *, header: Metadata) -> bool:
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
    plan: WritePlan, *, sources: Sequence[Item], comm: Collective, alignment: int,
    header: Metadata,
) -> FileLayout:  # fmt: skip
    """Collective."""
    file = plan.files.of_rank[comm.rank]
    leads = plan.files.leaders[file] == comm.rank

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
        iter(np.frombuffer(told[plan.files.leaders[number]], dtype=np.int64).tolist())
        for number in range(plan.files.count)
    ]
    offsets = [[next(by_file[piece.file]) for piece in tensor.pieces] for tensor in plan.tensors]
    if text is not None:
        text = text.with_offsets([offset for places in offsets for offset in places])
    own = own_bytes(plan, rank=comm.rank, offsets=offsets)
    return FileLayout(
        files=plan.files, skeleton=skeleton, text=text, own=own, kinds=_kinds(own, sources=sources),
        replicas=Replicas.of(sources, step=header.step),
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
