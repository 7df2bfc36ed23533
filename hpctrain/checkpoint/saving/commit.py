"""File operations of a save other than writing content: allocation, metadata, commit header, and the final rename.

Called by the rank that leads a file or folder; none is collective.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.checkpoint.files.checkpoint_names import (
    file_name,
    folder_name,
    remove,
    remove_partial_files,
    replaced_name,
)
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.files.syscalls import allocate
from hpctrain.checkpoint.format.commit_header import Seal, encode_seal
from hpctrain.checkpoint.loading.check_structure import check_sealed
from hpctrain.checkpoint.planning.hdf5_skeleton import Skeleton
from hpctrain.checkpoint.retention.file_recycling import take_spare
from hpctrain.errors import CheckpointError
from hpctrain.storage import InUseError, check_claim, claim, hash_of, sync_directory, write_fully


def make_room(directory: Path, partial: Path, *, folder: bool, spare_bytes: int | None = None) -> list[str]:
    """Creates the directory, removes partial checkpoints of killed saves, and creates the partial checkpoint if it is a
    folder or can reuse the disk blocks of a spare file.

    spare_bytes: length of the new file in bytes, to reuse a spare file for it; None: spare files are removed, too.
    Returns a message for each file that could not be removed, which does not prevent the save. Raises CheckpointError
    if the directory cannot be written to.
    """
    with explained(action="write checkpoints to", path=directory):
        missing = [place for place in (directory, *directory.parents) if not place.is_dir()]
        directory.mkdir(parents=True, exist_ok=True)
        for place in missing:  # flush the entry of every new directory, not only of the last
            sync_directory(place.parent)
        _claim(directory)
        if spare_bytes is not None:
            take_spare(directory, partial, file_bytes=spare_bytes)
        notes = remove_partial_files(directory, but=partial)
        if folder:
            partial.mkdir()
    return notes


def _claim(directory: Path) -> None:
    """Takes the lease on the directory, or checks that this process still has it. Raises CheckpointError."""
    try:
        claim(
            directory, beside=True, say=lambda text: print(f"hpctrain: {text}", file=sys.stderr, flush=True)
        )
    except InUseError as error:
        raise CheckpointError(str(error)) from error


def create_file(path: Path, *, file_bytes: int) -> None:
    """Allocates a file of `file_bytes` bytes without content, so that it has its full length and disk space. The file
    may exist already, with a stripe layout or as a recycled spare file. Raises CheckpointError."""
    with explained(action="create", path=path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            allocate(fd, num_bytes=file_bytes)
        finally:
            os.close(fd)


def seal_file(path: Path, *, skeleton: Skeleton, metadata: memoryview) -> None:
    """Writes metadata and commit header of the main file, flushes it, and reads back all that is not content.

    Call it after the content of all ranks is on disk. The checkpoint is committed by the rename that follows. Raises
    CheckpointError.
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
    """Flushes the entries of the folder (the names of its files) to disk. Raises CheckpointError."""
    with explained(action="write to disk", path=folder):
        sync_directory(folder)


def rename_finished(partial: Path, final: Path, *, unique: str) -> None:
    """Commits the checkpoint: renames it to its final name, under which readers find it, and flushes the directory.

    An older checkpoint of the same step is moved aside to a name under which readers still find it, and deleted after
    the rename; if that fails, the next save deletes it. Raises CheckpointError.
    """
    try:
        check_claim(final.parent, beside=True)
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
    """Returns the two names that a checkpoint of this step can have: as a file and as a folder."""
    step = int(name.removesuffix(".h5").removeprefix("step-"))
    return file_name(step), folder_name(step)
