"""File layout: the position of every byte of a checkpoint, agreed by all ranks and cached between saves.

A run saves the same tensors repeatedly. As long as names, dtypes and shapes are unchanged on all ranks, one small
vote replaces planning, laying out and exchanging offsets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from hpctrain.checkpoint.format.metadata import Metadata, empty_part_block, encode_header
from hpctrain.checkpoint.format.state import (
    FromRank0,
    Header,
    Item,
    State,
    TensorShard,
    encode_document,
    header_of,
)
from hpctrain.checkpoint.planning.hdf5_skeleton import (
    Skeleton,
    SkeletonDataset,
    TensorsText,
    make_skeleton,
    room_for,
    tensors_text,
)
from hpctrain.checkpoint.planning.rank_extents import ExtentGroup, OwnBytes, own_bytes
from hpctrain.checkpoint.planning.replicas import Replicas
from hpctrain.checkpoint.planning.write_plan import (
    EvenShards,
    Files,
    PieceKey,
    PlannedPiece,
    WritePlan,
    explain_difference,
    make_plan,
)
from hpctrain.comm import Collective, agreed, all_gather_distinct, all_gather_json, describe_ranks
from hpctrain.errors import CheckpointError
from hpctrain.storage import hash_of

# Combines every rank's state into one write plan, the same on all ranks.


def document_hash(state: State) -> str:
    """Returns the hash of the state's `document` and `parent`, which must be the same on every rank.

    Raises CheckpointError if they cannot be encoded as JSON.
    """
    return hash_of(_shared_text(state).encode())


def _shared_text(state: State) -> str:
    return encode_document({"document": state.document, "parent": state.parent})


def agree_on_plan(
    state: State, *, step: int, comm: Collective, file_of_rank: Sequence[int] | None = None
) -> WritePlan:
    """Returns the plan of a save: which rank writes which bytes of which tensor. Collective.

    The step, the assignment of ranks to files, the document and the list of replicated tensors must be the same on all
    ranks. If they are not, CheckpointError, with a description of the difference, is raised on every rank.
    `file_of_rank` contains, for each rank, the index of the file that it writes to; None: all ranks write to one file.
    """
    headers = agreed(comm, lambda: [header_of(item) for item in state.sources()])
    replicated = [header.to_json() for header in headers if header.box is None]
    shards = [header for header in headers if header.box is not None]
    even = EvenShards.of(shards, rank=comm.rank, num_ranks=comm.num_ranks)
    document = agreed(comm, lambda: _shared_text(state))
    files = None if file_of_rank is None else list(file_of_rank)
    mine = {
        "step": step,
        "files": hash_of(json.dumps(files).encode()),
        "document": hash_of(document.encode()),
        "replicated": hash_of(json.dumps(replicated).encode()),
        # Even shards are the same text on every rank.
        "even": even is not None,
        "shards": [header.to_json() for header in (shards if even is None else even.first)],
    }
    different, number_of_rank = all_gather_distinct(comm, mine)
    by_rank = [different[number] for number in number_of_rank]
    if any(entry["step"] != by_rank[0]["step"] for entry in by_rank):
        steps = ", ".join(f"{entry['step']} on rank {place}" for place, entry in enumerate(by_rank))
        raise CheckpointError(
            f"the ranks save different steps: {steps}. Pass the same step on every rank", agreed=True
        )
    if any(entry["files"] != by_rank[0]["files"] for entry in by_rank):
        texts = "; ".join(
            f"rank {rank} as {theirs}" for rank, theirs in enumerate(all_gather_json(comm, files)[:8])
        )
        raise CheckpointError(f"the ranks disagree on which rank writes to which file: {texts}", agreed=True)
    if any(entry["document"] != by_rank[0]["document"] for entry in by_rank):
        shared = json.loads(document)
        raise CheckpointError(
            _document_difference({**shared["document"], "parent": shared["parent"]}, comm), agreed=True
        )
    if any(entry["replicated"] != by_rank[0]["replicated"] for entry in by_rank):
        lists = [list(map(Header.from_json, entry)) for entry in all_gather_json(comm, replicated)]
        raise CheckpointError(
            f"the ranks' replicated tensors differ: {explain_difference(lists)}", agreed=True
        )
    return make_plan(
        replicated=[header for header in headers if header.box is None],
        shards_by_rank=_shards_of_all(different, number_of_rank),
        file_of_rank=file_of_rank,
    )


def _shards_of_all(
    different: Sequence[Mapping[str, Any]], number_of_rank: Sequence[int]
) -> Sequence[Sequence[Header]]:
    """Returns, for each rank, the shards (parts of sharded tensors) that it holds.

    `different` contains the distinct messages that ranks have sent, `number_of_rank` the index of each rank's
    message.
    """
    num_ranks = len(number_of_rank)
    listed = [tuple(map(Header.from_json, entry["shards"])) for entry in different]
    if len(different) == 1 and different[0]["even"]:
        return EvenShards(listed[0], num_ranks)
    return [
        EvenShards(listed[number], num_ranks)[rank] if different[number]["even"] else listed[number]
        for rank, number in enumerate(number_of_rank)
    ]


def _document_difference(document: dict[str, Any], comm: Collective) -> str:
    """Returns an error message: which top-level keys of the JSON document differ, and on which ranks. Collective."""
    hashes = {key: hash_of(json.dumps(value, sort_keys=True).encode()) for key, value in document.items()}
    by_rank = all_gather_json(comm, hashes)
    lines = []
    for key in sorted(set().union(*by_rank)):
        ranks = [comm.members[r] for r, entry in enumerate(by_rank) if entry.get(key) != by_rank[0].get(key)]
        if ranks:
            lines.append(f"{key!r} of {describe_ranks(ranks)} differs from rank {comm.members[0]}'s")
    return f"the checkpoint's document must be the same on every rank: {'; '.join(lines)}"


# File layout.


@dataclass(frozen=True, kw_only=True, eq=False)
class FileLayout:
    """Which bytes one rank writes in a save, and where; cached while names, dtypes and shapes are unchanged.

    Attributes:
        files: Which rank writes to which file.
        skeleton: What HDF5 itself stores in this rank's file, if this rank is the lowest rank that writes to the file;
            else None.
        text: The list of tensors in the metadata, as JSON text, on rank 0; else None.
        own: The bytes that this rank writes.
        kinds: Dtype, shape and memory layout of each tensor that this rank passes to the save, in the order of
            `State.sources()`.
        replicas: The replicated tensors. The ranks compare their copies of these tensors.
    """

    files: Files
    skeleton: Skeleton | None
    text: TensorsText | None
    own: OwnBytes
    kinds: Sequence[_Kind]
    replicas: Replicas

    def fits(self, sources: Sequence[Item]) -> bool:
        """Returns True if this layout can be used for `sources`, the tensors that this rank passes to the save.

        Their dtypes, shapes and memory layouts must be those for which the layout was computed.
        """
        try:
            return [_kind_of(source) for source in sources] == self.kinds
        except RuntimeError:  # a tensor without a shape, nested or lazy: planning reports it
            return False

    def groups_unchanged(self, sources: Sequence[Item]) -> Iterator[ExtentGroup]:
        """Yields what this rank writes, group by group, for a thread that writes while training continues.

        A group lists byte ranges of the tensors `sources`. Just before a group is yielded, its tensors are checked:
        raises CheckpointError if the dtype or shape of a tensor has changed since the layout was computed.
        """
        for group in self.own.groups:
            if any(_kind_of(sources[s.source]) != self.kinds[s.source] for s in group.segments):
                raise CheckpointError(
                    "a tensor's dtype or shape changed during the save: leave the state unchanged until the save ends"
                )
            yield group


_Kind: TypeAlias = tuple[torch.dtype, torch.Size, torch.layout]


def _kind_of(source: Item) -> _Kind:
    tensor = source.tensor
    return tensor.dtype, tensor.shape, tensor.layout


@dataclass(frozen=True, kw_only=True, eq=False)
class _Remembered:
    """A cached `FileLayout`.

    `number` is the index of the layout among all layouts that were made for the communicator, the same on all its
    ranks. `frame` contains everything that the layout depends on, except dtypes and shapes.
    """

    number: int
    frame: list[Any]
    layout: FileLayout


@dataclass(kw_only=True, eq=False)
class _Memory:
    """Cached layouts (which bytes each rank writes, and where) of one communicator, the newest last."""

    layouts: list[_Remembered] = field(default_factory=list)


_REMEMBERED = 2  # a run saves one kind of state, or two: everything, and only the weights


def layout_for(
    state: State,
    *,
    sources: Sequence[Item],
    step: int,
    comm: Collective,
    file_of_rank: Sequence[int],
    alignment: int,
    header: Metadata,
) -> FileLayout:
    """Returns which bytes this rank writes, and where; from the cache if possible. Collective.

    Args:
        state: This rank's part of the content.
        sources: The tensors of `state`, as `state.sources()` returns them.
        step: Step of the save.
        comm: The ranks that save together.
        file_of_rank: For each rank, the index of the file that it writes to.
        alignment: Alignment of large datasets in the file, in bytes.
        header: The metadata without tensors, parts and hashes; rank 0's is used.

    Raises:
        CheckpointError: On every rank, if the ranks' states are inconsistent, or if HDF5 cannot represent them.
    """
    frame = _frame(sources, file_of_rank=file_of_rank, alignment=alignment)
    memory = comm.attribute(_Memory)
    fitting = {
        entry.number: entry.layout
        for entry in memory.layouts
        if entry.frame == frame
        and entry.layout.fits(sources)
        and (comm.rank != 0 or _metadata_fits(entry.layout, header=header))
    }
    try:
        mine = document_hash(state)
    except CheckpointError:  # `agree_on_plan` raises it on all ranks
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


def _frame(sources: Sequence[Item], *, file_of_rank: Sequence[int], alignment: int) -> list[Any]:
    return [
        alignment,
        tuple(file_of_rank),
        [s.name for s in sources],
        [(s.offset, s.global_shape) for s in sources if isinstance(s, TensorShard)],
        [number for number, s in enumerate(sources) if isinstance(s, FromRank0)],
    ]


def _metadata_fits(layout: FileLayout, *, header: Metadata) -> bool:
    """Returns True if the metadata fits into the space that the cached `layout` reserves. Call this on rank 0.

    `header` is the metadata without the list of tensors. Returns False for metadata that exceeds the limit. A new
    layout is then computed, which raises an error on all ranks.
    """
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
    """Computes where each rank's bytes lie in the files, for a plan that states which rank writes which bytes.

    Collective: the lowest rank of each file creates the HDF5 structures of the file, and sends the offsets to all
    ranks.
    """
    file = plan.files.of_rank[comm.rank]
    leads = plan.files.leaders[file] == comm.rank
    pieces = plan.pieces_in(file)

    def lead() -> tuple[Skeleton | None, TensorsText | None]:
        text = tensors_text(plan) if comm.rank == 0 else None
        if not leads:
            return None, text
        padded_bytes = 0 if text is None else room_for(_encoded(header), text, num_parts=plan.files.count)
        block = b"" if file == 0 else empty_part_block()
        return make_skeleton(
            _datasets(plan, pieces), metadata_bytes=padded_bytes, user_block=block, alignment=alignment
        ), text

    skeleton, text = agreed(comm, lead, os_error=CheckpointError)
    gathered = comm.all_gather_bytes(np.array(skeleton.offsets if skeleton else [], dtype=np.int64).tobytes())

    def offsets_in(number: int) -> list[int]:
        return np.frombuffer(gathered[plan.files.leaders[number]], dtype=np.int64).tolist()

    if text is not None:
        every = {
            key: offset
            for number in range(plan.files.count)
            for key, offset in zip(plan.pieces_in(number), offsets_in(number), strict=True)
        }
        text = text.with_offsets([every[key] for key in sorted(every)])
    offsets = dict(zip(pieces, offsets_in(file), strict=True))
    own = own_bytes(plan, rank=comm.rank, pieces=pieces, offsets=offsets)
    return FileLayout(
        files=plan.files, skeleton=skeleton, text=text, own=own,
        kinds=[_kind_of(source) for source in sources], replicas=Replicas.of(sources, step=header.step),
    )  # fmt: skip


def _datasets(plan: WritePlan, pieces: Mapping[PieceKey, PlannedPiece]) -> list[SkeletonDataset]:
    return [
        SkeletonDataset(
            path=piece.dataset, dtype=plan.tensors[tensor].dtype, shape=piece.shape,
            num_bytes=piece.box.num_elems * plan.tensors[tensor].elem_bytes,
        )
        for (tensor, _), piece in pieces.items()
    ]  # fmt: skip
