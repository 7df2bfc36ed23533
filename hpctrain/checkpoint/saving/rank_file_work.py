"""The file operations of a save on one rank: creating files, writing the rank's content, committing by a rename.

Most operations are done only by the leader of a file, which is the lowest rank that writes to the file, or by the
rank that leads the folder. Only `create_partial`, and writing with the engine `mpio`, are collective; all else can
run in a separate thread.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.engines.engine_choice import EngineChoice
from hpctrain.checkpoint.engines.engine_name import Engine
from hpctrain.checkpoint.files.checkpoint_names import (
    file_name,
    folder_name,
    part_name,
    partial_name,
    remove,
    remove_partial_files,
    replaced_name,
)
from hpctrain.checkpoint.files.direct_io import Staging, allocate
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.files.lustre_striping import set_stripes, stripes_for
from hpctrain.checkpoint.format.metadata import (
    SEAL_BYTES,
    Metadata,
    PartSeal,
    Seal,
    StoredPart,
    encode_header,
    encode_part_seal,
    encode_seal,
)
from hpctrain.checkpoint.loading.check_structure import check_sealed
from hpctrain.checkpoint.planning.file_layout import FileLayout
from hpctrain.checkpoint.planning.hdf5_skeleton import Skeleton, metadata_text, structure_hash
from hpctrain.checkpoint.planning.rank_extents import Content
from hpctrain.checkpoint.retention.delete_old import retain
from hpctrain.checkpoint.saving.save_options import SaveOptions, retention_of
from hpctrain.comm import Collective, agreed, on_rank_0
from hpctrain.errors import CheckpointError, HpctrainError
from hpctrain.storage import InUseError, check_lease, hash_of, sync_directory, take_lease, write_fully

# File operations of a save other than writing content: allocation, metadata, commit header, and the final
# rename.
#
# Called by the rank that leads a file or folder; none is collective.


def make_room(directory: Path, partial: Path, *, folder: bool) -> list[str]:
    """Creates the checkpoint directory, locks it for this run, and removes what killed saves have left.

    The lock is a lease that keeps other runs from saving to the directory. What killed saves have left are incomplete
    checkpoints. If `folder` is True, this also creates the folder `partial`, in which the checkpoint is written.
    Returns a message for each file that could not be removed; such a file does not prevent the save. Raises
    CheckpointError if the directory cannot be written to, or if another run saves to it.
    """
    with explained(action="write checkpoints to", path=directory):
        missing = [place for place in (directory, *directory.parents) if not place.is_dir()]
        directory.mkdir(parents=True, exist_ok=True)
        for place in missing:  # flush the entry of every new directory, not only of the last
            sync_directory(place.parent)
        _claim(directory)
        notes = remove_partial_files(directory)
        if folder:
            partial.mkdir()
    return notes


def _claim(directory: Path) -> None:
    """Takes the lease (a lock) on the directory, or checks that this process still has the lease.

    Raises CheckpointError if another run saves to the directory.
    """
    try:
        take_lease(
            directory,
            in_parent=True,
            say=lambda text: print(f"hpctrain: {text}", file=sys.stderr, flush=True),
        )
    except InUseError as error:
        raise CheckpointError(str(error)) from error


def create_file(path: Path, *, file_bytes: int) -> None:
    """Creates a file of `file_bytes` bytes, with its disk space, but without content. Raises CheckpointError.

    The file may exist already, since setting a stripe layout creates it.
    """
    with explained(action="create", path=path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            allocate(fd, num_bytes=file_bytes)
        finally:
            os.close(fd)


def seal_file(path: Path, *, skeleton: Skeleton, metadata: memoryview) -> None:
    """Completes the main file of a checkpoint: writes metadata and commit header, flushes, and reads back.

    All bytes except tensor content are read back. The commit header proves that the file is complete. Call this
    function after the content of all ranks is on disk. The rename that follows makes the checkpoint visible to readers.
    Raises CheckpointError.
    """
    seal = Seal(
        metadata_offset=skeleton.metadata_offset,
        metadata_bytes=metadata.nbytes,
        metadata_hash=hash_of(metadata),
        structure_hash=skeleton.structure_hash,
        file_bytes=skeleton.file_bytes,
    )
    with explained(action="write", path=path):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            write_fully(fd, metadata, offset=seal.metadata_offset)
            write_fully(fd, memoryview(encode_seal(seal)), offset=0)
            os.fsync(fd)
        finally:
            os.close(fd)
    check_sealed(path, seal=seal, structure=[(offset, len(data)) for offset, data in skeleton.byte_ranges])


def flush_folder(folder: Path) -> None:
    """Flushes the names of the files in a folder to disk. Raises CheckpointError."""
    with explained(action="write to disk", path=folder):
        sync_directory(folder)


def rename_finished(partial: Path, final: Path, *, unique: str) -> None:
    """Renames a finished checkpoint from `partial` to `final`, where readers find it, and flushes the directory.

    An older checkpoint of the same step is moved aside, to a name under which readers still find it, and deleted
    after the rename. If the deletion fails, the next save deletes it. Raises CheckpointError.
    """
    try:
        check_lease(final.parent, in_parent=True)
    except InUseError as error:
        raise CheckpointError(str(error)) from error
    step_forms = [final.with_name(name) for name in _forms(final.name)]
    replaced: list[tuple[Path, Path]] = []
    with explained(action="rename the finished checkpoint to", path=final):
        for existing in step_forms:
            # rename(2) replaces a file by a file atomically, but not a folder that has files in it.
            if (existing != final or final.is_dir()) and existing.exists():
                aside = existing.with_name(replaced_name(existing.name, unique=unique))
                os.rename(existing, aside)
                replaced.append((existing, aside))
        try:
            os.rename(partial, final)
        except OSError:
            for existing, aside in replaced:
                with suppress(OSError):
                    os.rename(aside, existing)
            raise
    with explained(action="flush to disk the new name of the checkpoint", path=final):
        sync_directory(final.parent)
    for _, aside in replaced:
        with suppress(OSError):
            remove(aside)


def _forms(name: str) -> Sequence[str]:
    """Returns the two names that a checkpoint of the same step as `name` can have: as a file and as a folder."""
    step = int(name.removesuffix(".h5").removeprefix("step-"))
    return file_name(step), folder_name(step)


# Creates the partial checkpoint of a save: its name, its stripe layout and its disk space, without content.


def create_partial(
    directory: Path,
    name: str,
    *,
    layout: FileLayout,
    choice: EngineChoice,
    comm: Collective,
    options: SaveOptions,
) -> tuple[Path, str, str]:
    """Creates the files of a new checkpoint under a temporary name, without content. Collective.

    Returns the temporary path of the checkpoint, the id of the save, and notes for the user as one text. If any rank
    fails, the files are removed and every rank raises CheckpointError.
    """
    leads = leads_folder(layout, comm=comm, options=options)
    unique = on_rank_0(comm, lambda: secrets.token_hex(8))
    partial = directory / partial_name(name, unique=unique)

    def make() -> list[str]:
        if not leads:
            return []
        return make_room(directory, partial, folder=options.files != 1)

    def create() -> str:
        if layout.skeleton is None:
            return ""
        path = file_in(partial, layout.files.of_rank[comm.rank], options=options)
        file_bytes = layout.skeleton.file_bytes
        note = set_stripes(path, stripes=stripes_for(file_bytes), filesystem=choice.filesystem)
        create_file(path, file_bytes=file_bytes)
        return note or ""

    try:
        notes = agreed(comm, make, os_error=CheckpointError)
        notes += [agreed(comm, create, os_error=CheckpointError)]
        return partial, unique, "; ".join(filter(None, notes))
    except HpctrainError:
        if leads:
            with suppress(OSError):
                remove(partial)
        raise


def leads_folder(layout: FileLayout, *, comm: Collective, options: SaveOptions) -> bool:
    """Returns True if this rank creates and renames the checkpoint. Not collective.

    That rank is rank 0. In local mode each node has a checkpoint folder of its own, and the lowest rank that writes to
    the node's file creates and renames the folder.
    """
    return layout.skeleton is not None if options.local else comm.rank == 0


def file_in(partial: Path, number: int, *, options: SaveOptions) -> Path:
    """Returns the path of file `number` of the checkpoint that is being written at `partial`. Pure."""
    return partial if options.files == 1 else partial / part_name(number)


# File operations of one rank in a save: writing its content, and its part of the commit.
#
# Nothing here waits for other ranks, except the engine `mpio`; so it can run in a separate thread.


@dataclass(frozen=True, kw_only=True, eq=False)
class FileWork:
    """The file operations of one save on one rank. Its methods raise CheckpointError.

    Attributes:
        final: Path of the finished checkpoint.
        partial: Path of the checkpoint while it is being written.
        comm: The ranks that save together.
        layout: Which bytes this rank writes, and where.
        choice: The engine that writes the bytes.
        options: Options of the save.
        header: The metadata, without the lists of tensors and part files and without hashes.
    """

    final: Path
    partial: Path
    comm: Collective
    layout: FileLayout
    choice: EngineChoice
    options: SaveOptions
    header: Metadata

    @property
    def bypasses_cache(self) -> bool:
        return self.choice.engine is Engine.DIRECT and self.options.bypass_cache(self.choice.filesystem)

    def write_content(self, content: Content, *, staging: Staging) -> bytes:
        """Writes this rank's bytes, flushes them to disk, and returns a record for `commit`.

        The record is a line of JSON about the rank's file, followed by the hashes (uint64) of the rank's extents in the
        order of the write plan. An extent is a region of a tensor that has one hash.
        """
        layout, options = self.layout, self.options
        hashes = np.zeros(len(layout.own.extent_bytes), dtype=np.uint64)
        structure = [] if layout.skeleton is None else self._structure()
        about: dict[str, Any] = {}
        if layout.skeleton is not None and self._file:
            about = {"bytes": layout.skeleton.file_bytes, "structure": structure_hash(structure)}
        limit = options.limit_mb_per_s
        self.choice.write(
            file_in(self.partial, self._file, options=options), layout.own.byte_ranges(content, hashes=hashes),
            structure=[(offset, memoryview(data)) for offset, data in structure], comm=self.comm,
            groups=self._groups, bypass_cache=self.bypasses_cache, staging=staging,
            limit_bytes_per_s=None if limit is None else limit * 1e6,
        )  # fmt: skip
        if options.local and self._leads_folder:
            flush_folder(self.partial)
        return json.dumps(about).encode() + b"\n" + hashes.tobytes()

    def commit(self, content_results: Sequence[bytes]) -> dict[str, Any]:
        """Does this rank's part of finishing the checkpoint: metadata, commit header, rename to the final name.

        Rank 0 writes the metadata and the commit header. A rank for which `leads_folder` is True renames the
        checkpoint. `content_results` contains the result of `write_content` on each rank. Returns a dict with two
        entries: "bytes" is the size of the checkpoint (0 except on rank 0), "notes" is a list of messages.
        """
        notes: list[str] = []
        total_bytes = 0
        if self.comm.rank == 0:
            parts, hashes = self._gathered(content_results)
            skeleton, text = self.layout.skeleton, self.layout.text
            assert skeleton is not None
            assert text is not None
            header = encode_header(replace(self.header, parts=parts), byte_order=sys.byteorder)
            metadata = metadata_text(header, text, hashes=hashes, padded_bytes=skeleton.metadata_bytes)
            seal_file(file_in(self.partial, 0, options=self.options), skeleton=skeleton, metadata=metadata)
            total_bytes = skeleton.file_bytes + sum(part.num_bytes for part in parts)
            if self.options.files != 1:
                flush_folder(self.partial)
        if self._leads_folder:
            rename_finished(self.partial, self.final, unique=self.header.id)
            if not self.options.local:
                notes = self._retain()
        return {"bytes": total_bytes, "notes": notes}

    def after_commit(self) -> list[str]:
        """In local mode, deletes checkpoints that are no longer kept; returns messages for the user.

        Call this method after `commit` has succeeded on all ranks.
        """
        return self._retain() if self.options.local and self._leads_folder else []

    def undo(self, *, committing: bool) -> None:
        """Removes the files of a save that failed on any rank.

        `committing` is True if `commit` was started. In local mode this rank may then have renamed the checkpoint
        already, so the checkpoint with the final name is removed too. In all other cases a checkpoint with the final
        name is kept, since this may be an older checkpoint of the same step.
        """
        if self._leads_folder:
            for path in (self.partial, *([self.final] if self.options.local and committing else [])):
                with suppress(OSError):
                    remove(path)

    def _retain(self) -> list[str]:
        return retain(self.final.parent, saved=self.final, retention=retention_of(self.options.keep))

    def _gathered(
        self, content_results: Sequence[bytes]
    ) -> tuple[tuple[StoredPart, ...], NDArray[np.uint64]]:
        """Collects what the ranks wrote: a list of the part files, and the hashes of all ranks' extents."""
        files = self.layout.files
        entries = [data.partition(b"\n") for data in content_results]
        parts = []
        for number in range(1, files.count):
            about = json.loads(entries[files.leaders[number]][0])
            parts.append(
                StoredPart(
                    name=part_name(number), num_bytes=about["bytes"], structure_hash=about["structure"]
                )
            )
        hashes = np.frombuffer(b"".join(data for _, _, data in entries), dtype=np.uint64)
        return tuple(parts), hashes

    def _structure(self) -> list[tuple[int, bytes]]:
        """Returns what HDF5 itself stores in this rank's file (such as headers), as byte ranges (offset, data).

        Call this only on the lowest rank that writes to the file.
        """
        skeleton = self.layout.skeleton
        assert skeleton is not None
        byte_ranges = list(skeleton.byte_ranges)
        if self._file:  # the header of a part file lies in the first byte range
            seal = PartSeal(
                id=self.header.id, step=self.header.step, number=self._file, num_files=self.layout.files.count
            )
            offset, data = byte_ranges[0]
            byte_ranges[0] = (offset, encode_part_seal(seal) + data[SEAL_BYTES:])
        return byte_ranges

    @property
    def _file(self) -> int:
        return self.layout.files.of_rank[self.comm.rank]

    @property
    def _groups(self) -> list[list[int]]:
        """For each file, the world ranks that write to it."""
        files = self.layout.files
        groups: list[list[int]] = [[] for _ in range(files.count)]
        for member, file in zip(self.comm.members, files.of_rank, strict=True):
            groups[file].append(member)
        return groups

    @property
    def _leads_folder(self) -> bool:
        return leads_folder(self.layout, comm=self.comm, options=self.options)
