"""Opens a checkpoint and reads its tensors: every rank reads by itself, or the ranks of a node share the reading.

Rank 0 verifies the structure, and sends the metadata to the other ranks.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.files.direct_io import fresh_tensor, memory_of
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.boxes import Box, whole_box
from hpctrain.checkpoint.format.metadata import (
    Metadata,
    StoredPiece,
    StoredTensor,
    UnknownFormatError,
    decode_metadata,
)
from hpctrain.checkpoint.loading.check_structure import ContentFiles, Structure, is_checkpoint, read_structure
from hpctrain.checkpoint.loading.verified_content import (
    ElementRun,
    Read,
    check_run,
    element_runs_of,
    flat_start,
    planned,
    planned_run,
    read_region,
)
from hpctrain.comm import Collective, agreed, all_gather_json, on_rank_0
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.storage import filesystem_of

# What to read of tensors that a rank needs only in part: a box (offset, shape), or a list of boxes, which are joined
# along the first dimension.
_Box = tuple[tuple[int, ...], tuple[int, ...]]
Regions = Mapping[str, _Box | list[_Box]]

# Number of tensors planned before they are read: few enough that the plans of small ones stay in the processor's
# caches, and many enough that planning large ones takes a negligible time.
_PLANNED_TENSORS = 64


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint. Its structure and metadata have been verified; tensor content is verified as it is read.

    No file is kept open, and no method is collective.

    Attributes:
        path: The checkpoint's file or folder.
        files: Paths of the checkpoint's files. The first one is the main file, which contains the metadata.
        file_bytes: Total length of the checkpoint's files.
        metadata: What the checkpoint records about itself.
    """

    path: Path
    files: tuple[Path, ...]
    file_bytes: int
    metadata: Metadata

    @property
    def step(self) -> int:
        return self.metadata.step

    @property
    def document(self) -> Mapping[str, Any]:
        return self.metadata.document

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by name, with `.dtype` (such as "float32") and `.shape`; reads no content."""
        return self.metadata.tensors

    def read(
        self, name: str, *, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Reads a tensor, or a box (rectangular region) of the tensor, and verifies every byte.

        Args:
            name: Name of the tensor.
            offset: Index of the box's first element, one number per dimension; None: the origin.
            shape: Shape of the box; None: from `offset` to the end of each dimension.

        Returns:
            The elements as a CPU tensor of the box's shape.

        Raises:
            CheckpointError: For an unknown name, a box that extends beyond the tensor, and damaged or unreadable
                content.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; it has {_some(list(self.tensors))}")
        region = self.region_of(tensor, offset=offset, shape=shape)
        with self.named(), ContentFiles(self.files) as files:
            return read_region(files, tensor=tensor, region=region)

    def read_all(
        self,
        *,
        regions: Regions | None = None,
        names: Iterable[str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Reads all tensors, or those in `names`, and verifies every byte that it reads.

        Args:
            regions: For tensors that are needed only in part. Maps a tensor's name to the box to read, (offset,
                shape), or to a list of boxes, whose elements are concatenated along the first dimension.
            names: Names of the tensors to read; None: all.

        Returns:
            The tensors by name, on the CPU.

        Raises:
            CheckpointError: As in `read`.
        """
        regions = regions or {}
        missing = [name for name in regions if name not in self.tensors]
        if missing:
            raise CheckpointError(
                f"{self.path} has no tensor {_some(missing)}, of which `regions` requests a part"
            )
        loaded: dict[str, torch.Tensor] = {}
        parts: dict[str, list[torch.Tensor]] = {}
        wanted = iter(self.tensors if names is None else names)
        with self.named(), ContentFiles(self.files, read_ahead=names is None) as files:
            while some := list(islice(wanted, _PLANNED_TENSORS)):
                reads: list[Read] = []
                for name in some:
                    tensor = self.tensors[name]
                    parts[name] = []
                    boxes = regions.get(name, _whole(tensor))
                    for offset, shape in boxes if isinstance(boxes, list) else [boxes]:
                        region = self.region_of(tensor, offset=offset, shape=shape)
                        part, its_reads = planned(tensor, region=region)
                        parts[name].append(part)
                        reads += its_reads
                for read in reads:
                    read(files)
                for name in some:
                    found = parts.pop(name)
                    loaded[name] = found[0] if len(found) == 1 else torch.cat(found)
        return loaded

    @contextmanager
    def named(self) -> Iterator[None]:
        """Context in which read errors become a CheckpointError that names this checkpoint."""
        try:
            with explained(action="read", path=self.path):
                yield
        except CheckpointError as error:
            raise CheckpointError(_with_path(error, self.path)) from error

    def region_of(
        self, tensor: StoredTensor, *, offset: tuple[int, ...] | None, shape: tuple[int, ...] | None
    ) -> Box:
        """Returns the box (rectangular region) of a tensor that `read` would read.

        Args:
            tensor: The tensor.
            offset: Index of the box's first element; None: the origin.
            shape: Shape of the box; None: from `offset` to the end of each dimension.

        Returns:
            The box.

        Raises:
            CheckpointError: Unless the box lies within the tensor.
        """
        begin = whole_box(tensor.shape).offset if offset is None else tuple(offset)
        if shape is None and len(begin) == len(tensor.shape):
            shape = tuple(n - o for n, o in zip(tensor.shape, begin, strict=True))
        region = Box(offset=begin, shape=tuple(shape or ()))
        if not region.lies_within(tensor.shape):
            raise CheckpointError(
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}: it does not contain the box at "
                f"{list(region.offset)} of shape {list(region.shape)}"
            )
        return region


def open_checkpoint(path_or_directory: Path | str, *, comm: Collective) -> Checkpoint:
    """Opens one checkpoint, or the newest checkpoint with an undamaged structure in a directory. Collective.

    Only rank 0 accesses the filesystem. In a directory, checkpoints with a damaged structure are skipped; a line on
    stderr reports each.

    Args:
        path_or_directory: A checkpoint (file or folder), or a directory of checkpoints.
        comm: The ranks that open it together.

    Returns:
        The checkpoint, the same on every rank; no tensor has been read yet.

    Raises:
        CheckpointError: On every rank, if there is no checkpoint, or if the given one is damaged.
    """
    return from_rank_0(comm, lambda: _choose(Path(path_or_directory)))


def from_rank_0(comm: Collective, look: Callable[[], Structure]) -> Checkpoint:
    """Calls `look` on rank 0 to find a checkpoint, and returns the checkpoint on every rank. Collective.

    `look` returns the verified structure of the checkpoint. If `look` raises an error, every rank raises an error:
    UnknownFormatError unchanged, other errors as `on_rank_0` raises them.
    """
    seen: list[Structure] = []

    def read() -> dict[str, Any]:
        try:
            structure = look()
        except UnknownFormatError as error:
            return {"unknown_format": str(error)}
        seen.append(structure)
        return {
            "path": str(structure.path),
            "main": str(structure.main),
            "main_bytes": structure.main_bytes,
            "metadata": structure.metadata_text,
        }

    message = on_rank_0(comm, read)
    if "unknown_format" in message:
        raise UnknownFormatError(message["unknown_format"], agreed=True)
    if seen:  # rank 0 has decoded it already
        return checkpoint_of(seen[0])
    metadata = decode_metadata(
        message["metadata"].encode(), file_bytes=message["main_bytes"], byte_order=sys.byteorder
    )
    return checkpoint_of(
        Structure(
            path=Path(message["path"]),
            main=Path(message["main"]),
            main_bytes=message["main_bytes"],
            metadata_text=message["metadata"],
            metadata=metadata,
        )
    )


def checkpoint_of(structure: Structure) -> Checkpoint:
    parts = structure.metadata.parts
    return Checkpoint(
        path=structure.path,
        files=(structure.main, *(structure.path / part.name for part in parts)),
        file_bytes=structure.main_bytes + sum(part.num_bytes for part in parts),
        metadata=structure.metadata,
    )


def _choose(path: Path) -> Structure:
    if not path.is_dir() or is_checkpoint(path):
        return read_structure(path)
    rejected: list[str] = []
    for candidate in finished_newest_first(path):
        try:
            return read_structure(candidate)
        except UnknownFormatError:
            raise
        except CheckpointError as error:
            rejected.append(str(error))
            say_rejected(str(error))
    if rejected:
        raise CheckpointError(f"no checkpoint in {path} can be used: {'; '.join(rejected)}")
    raise CheckpointError(f"there is no checkpoint in {path}")


def say_rejected(reason: str) -> None:
    """Prints to stderr that a checkpoint is skipped, and why."""
    print(f"hpctrain: CHECKPOINT REJECTED: {reason}", file=sys.stderr, flush=True)


def _with_path(error: CheckpointError, path: Path) -> str:
    return str(error) if str(path) in str(error) else f"{path}: {error}"


def _whole(tensor: StoredTensor) -> _Box:
    box = whole_box(tensor.shape)
    return box.offset, box.shape


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


# Reads tensors that all ranks need once per node: each rank reads and verifies a part, then they exchange
# the parts.
#
# This is faster on network and parallel filesystems, where a second reader on the node finds nothing
# cached, or where several readers get more bandwidth than one. On a local disk the page cache serves the
# ranks with one copy less.


# Most bytes that a rank sends to all ranks of its node in one round; it receives at most as many.
_ROUND_BYTES = 64 << 20
_LEAST_BYTES = 16 << 20  # for a smaller checkpoint the messages cost more than they save


class Sharing(Enum):
    """Whether the ranks of a node share the reading of a checkpoint.

    NODE: each rank of a node reads a part and sends it to the others. NONE: every rank reads all that it needs.
    AUTO: NODE for a large checkpoint on a filesystem that nodes share, otherwise NONE.
    """

    AUTO = "auto"
    NODE = "node"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadUnit:
    """A part of a tensor that one rank reads and sends to the other ranks of its node.

    Its bytes are `begin` to `begin + num_bytes - 1` of the tensor.
    """

    name: str
    begin: int
    num_bytes: int
    piece: StoredPiece
    element_run: ElementRun


def units_of(tensor: StoredTensor) -> list[ReadUnit] | None:
    """Divides a tensor into parts, each of which one rank of a node reads and sends to the other ranks of the node.

    Returns None if the reading cannot be shared: if a piece of the tensor (an HDF5 dataset) is not contiguous in the
    tensor, or if a range of elements that must be read at once is longer than _ROUND_BYTES, the limit of one round of
    the exchange.
    """
    units = []
    for piece in tensor.pieces:
        if not piece.box.num_elems:
            continue
        place = flat_start(piece.box, shape=tensor.view)
        if place is None:
            return None
        for element_run in element_runs_of(piece):
            num_bytes = element_run.num_elems * tensor.elem_bytes
            if num_bytes > _ROUND_BYTES:
                return None
            begin = (place + element_run.start) * tensor.elem_bytes
            units.append(
                ReadUnit(
                    name=tensor.name, begin=begin, num_bytes=num_bytes, piece=piece, element_run=element_run
                )
            )
    return units


def divide_units(units: Sequence[ReadUnit], *, num_ranks: int) -> list[list[list[ReadUnit]]]:
    """Distributes the parts of tensors that a node reads over the `num_ranks` ranks of the node. Pure.

    Returns for each rank a list of rounds of the exchange; a round is a list of units (parts of tensors). The result is
    the same on every rank. Each rank gets consecutive units of about the same total size, so that every rank reads one
    contiguous part of the files.
    """
    total_bytes = sum(unit.num_bytes for unit in units)
    most_bytes = _ROUND_BYTES // num_ranks
    shares: list[list[list[ReadUnit]]] = [[] for _ in range(num_ranks)]
    free_bytes = [0] * num_ranks
    position = 0
    for unit in units:
        rank = min(num_ranks - 1, position * num_ranks // max(1, total_bytes))
        if not shares[rank] or unit.num_bytes > free_bytes[rank]:
            shares[rank].append([])
            free_bytes[rank] = most_bytes
        shares[rank][-1].append(unit)
        free_bytes[rank] -= unit.num_bytes
        position += unit.num_bytes
    return shares


def nodes_that_share(
    checkpoint: Checkpoint, *, comm: Collective, sharing: Sharing | str, node_of_rank: Sequence[int] | None
) -> list[list[int]] | None:
    """Decides whether the ranks of a node share the reading of a checkpoint. Collective.

    Returns the ranks (of `comm`) of each node, or None if every rank reads alone. `node_of_rank` contains the node of
    each rank; None: ranks with the same host name share a node. Raises UsageError on every rank if `node_of_rank` does
    not have one entry per rank, or if `sharing` is unknown.
    """
    try:
        asked = Sharing(sharing)
    except ValueError:
        raise UsageError(
            f"sharing = {sharing!r}: choose one of {', '.join(repr(s.value) for s in Sharing)}", agreed=True
        ) from None
    if comm.num_ranks == 1 or asked is Sharing.NONE:
        return None
    if node_of_rank is not None and len(node_of_rank) != comm.num_ranks:
        raise UsageError(
            f"node_of_rank lists {len(node_of_rank)} ranks, the number of ranks is {comm.num_ranks}",
            agreed=True,
        )
    if asked is Sharing.AUTO:
        num_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
        pays = on_rank_0(comm, lambda: num_bytes >= _LEAST_BYTES and filesystem_of(checkpoint.path).is_shared)
        if not pays:
            return None
    names = all_gather_json(comm, socket.gethostname()) if node_of_rank is None else list(node_of_rank)
    nodes: dict[object, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return None if len(nodes) == comm.num_ranks else list(nodes.values())


def read_sharing(
    checkpoint: Checkpoint,
    *,
    comm: Collective,
    nodes: Sequence[Sequence[int]],
    names: Sequence[str],
    regions: Regions,
) -> dict[str, torch.Tensor]:
    """Reads the tensors `names`. A tensor that all ranks need as a whole is read only once per node. Collective.

    A tensor is needed as a whole if no rank lists it in `regions`. All other tensors, and tensors whose reading cannot
    be shared (see `units_of`), are read as by `Checkpoint.read_all`. `nodes` contains the ranks of each node; `names`
    must be the same on every rank. Raises CheckpointError on every rank if any rank finds damage.
    """
    not_whole = set().union(*all_gather_json(comm, sorted(regions)))
    units: list[ReadUnit] = []
    own: list[str] = []
    for name in names:
        found = None if name in not_whole else units_of(checkpoint.tensors[name])
        if found is None:
            own.append(name)
        else:
            units += found
    node = next(ranks for ranks in nodes if comm.rank in ranks)
    shares_by_size = {len(ranks): divide_units(units, num_ranks=len(ranks)) for ranks in nodes}
    shares = dict(zip(node, shares_by_size[len(node)], strict=True))
    num_rounds = max(len(rounds) for divided in shares_by_size.values() for rounds in divided)
    loaded: dict[str, torch.Tensor] = {}
    memory: dict[str, NDArray[Any]] = {}

    def read_own() -> None:
        mine = checkpoint.read_all(names=own, regions=regions)
        for name in names:
            stored = checkpoint.tensors[name]
            loaded[name] = mine[name] if name in mine else fresh_tensor(stored.shape, dtype=stored.dtype)
            if name not in mine and stored.num_bytes:
                memory[name] = memory_of(loaded[name])
        reads = []
        for unit in (unit for units in shares[comm.rank] for unit in units):
            stored = checkpoint.tensors[unit.name]
            read = planned_run(
                stored, piece=unit.piece, element_run=unit.element_run, region=whole_box(stored.shape),
                target=memory[unit.name],
            )  # fmt: skip
            assert read is not None
            reads.append(read)
        with checkpoint.named(), ContentFiles(checkpoint.files, read_ahead=True) as files:
            for read in reads:
                read(files)

    agreed(comm, read_own)
    for place in range(num_rounds):
        round_of = {rank: rounds[place] if place < len(rounds) else [] for rank, rounds in shares.items()}
        _exchange(comm, round_of=round_of, memory=memory)

    def check_received() -> None:
        with checkpoint.named(), ContentFiles(checkpoint.files) as files:
            for rank, rounds in shares.items():
                for unit in (unit for units in rounds for unit in units if rank != comm.rank):
                    check_run(
                        files,
                        tensor=checkpoint.tensors[unit.name],
                        piece=unit.piece,
                        element_run=unit.element_run,
                        buffer=memory[unit.name][unit.begin : unit.begin + unit.num_bytes],
                    )

    agreed(comm, check_received)  # transfers between ranks can corrupt data, too
    return loaded


def _exchange(
    comm: Collective, *, round_of: Mapping[int, Sequence[ReadUnit]], memory: Mapping[str, NDArray[Any]]
) -> None:
    """Exchanges the parts of tensors that the ranks of a node have read for one round. Collective.

    Sends this rank's parts to the other ranks of the node, and copies the parts of these ranks into `memory`.
    `round_of` contains the parts by rank. `memory` contains the bytes of each tensor: uint8, shape (num_bytes,).
    """
    counts = [sum(unit.num_bytes for unit in round_of.get(rank, ())) for rank in range(comm.num_ranks)]
    others = [rank for rank in round_of if rank != comm.rank]
    own = np.empty((len(others), counts[comm.rank]), dtype=np.uint8)
    start = 0
    for unit in round_of[comm.rank]:
        own[:, start : start + unit.num_bytes] = memory[unit.name][unit.begin : unit.begin + unit.num_bytes]
        start += unit.num_bytes
    received = comm.all_to_all(
        torch.from_numpy(own).reshape(-1),
        send_counts=[counts[comm.rank] if rank in others else 0 for rank in range(comm.num_ranks)],
        receive_counts=[counts[rank] if rank in others else 0 for rank in range(comm.num_ranks)],
    )
    arrived = received.cpu().numpy()
    start = 0
    for rank in sorted(others):
        for unit in round_of[rank]:
            part = arrived[start : start + unit.num_bytes]
            memory[unit.name][unit.begin : unit.begin + unit.num_bytes] = part
            start += unit.num_bytes
