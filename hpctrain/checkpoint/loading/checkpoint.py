"""Opens a checkpoint: rank 0 chooses it and verifies its structure, all ranks read from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.format.boxes import Box, whole
from hpctrain.checkpoint.format.commit_header import UnknownFormatError
from hpctrain.checkpoint.format.metadata import Metadata, StoredTensor, decode_metadata
from hpctrain.checkpoint.loading.check_structure import Structure, is_checkpoint, read_structure
from hpctrain.checkpoint.loading.open_files import ContentFiles
from hpctrain.checkpoint.loading.verified_content import Read, planned, read_region
from hpctrain.comm import Collective, on_rank_0
from hpctrain.errors import CheckpointError

# What to read of tensors that a rank needs only in part: a box (offset, shape), or a list of boxes, which are joined
# along the first dimension.
_Box = tuple[tuple[int, ...], tuple[int, ...]]
Regions = Mapping[str, _Box | list[_Box]]

# Number of tensors planned before they are read: few enough that the plans of small ones stay in the processor's
# caches, and many enough that planning large ones takes a negligible time.
_PLANNED_TENSORS = 64


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose structure and metadata have been verified; content is verified as it is read.

    path: the file or folder. files: its files by number; the first is the main one. file_bytes: length of all files
    together. No file is kept open. Nothing here is collective.
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
        """The tensors by name, with `.dtype` (such as "float32") and `.shape`."""
        return self.metadata.tensors

    def read(
        self, name: str, *, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """Returns a tensor, or its box at `offset` of `shape`, on the CPU with every byte verified.

        `offset` defaults to zeros, `shape` to the rest of the tensor. Raises CheckpointError for an unknown name, a
        box outside the tensor, and damage.
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
        """Returns all tensors by name, or those in `names`; of the tensors in `regions` only these boxes. Raises
        as `read`."""
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
        """Context in which read errors are raised as CheckpointError with this checkpoint's path."""
        try:
            with explained(action="read", path=self.path):
                yield
        except CheckpointError as error:
            raise CheckpointError(_with_path(error, self.path)) from error

    def region_of(
        self, tensor: StoredTensor, *, offset: tuple[int, ...] | None, shape: tuple[int, ...] | None
    ) -> Box:
        """Returns the box of `tensor` at `offset` (None: the origin) with `shape` (None: to the end of each dimension).
        Raises CheckpointError unless it lies within the tensor. Not collective."""
        begin = whole(tensor.shape).offset if offset is None else tuple(offset)
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
    """Opens the given checkpoint (file or folder), or the newest one in the given directory whose structure is
    undamaged. Collective.

    Only rank 0 accesses the filesystem. In a directory it skips checkpoints of damaged structure, with a line on
    stderr. Raises CheckpointError on every rank if there is no checkpoint, or the given one is damaged.
    """
    return from_rank_0(comm, lambda: _choose(Path(path_or_directory)))


def from_rank_0(comm: Collective, look: Callable[[], Structure]) -> Checkpoint:
    """Calls `look` on rank 0 and returns its checkpoint on every rank. Collective.

    An error of `look` is raised on every rank: UnknownFormatError as such, others as `on_rank_0` does.
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
    box = whole(tensor.shape)
    return box.offset, box.shape


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
