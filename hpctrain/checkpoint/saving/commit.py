"""The file operations around a checkpoint's content: room for it, its seal, and the rename that makes it count.

Each function is for one rank alone, the one that leads a file; none communicates.
"""

from __future__ import annotations

import os
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
from hpctrain.checkpoint.files.full_io import explained, sync_directory, write_fully
from hpctrain.checkpoint.files.syscalls import allocate
from hpctrain.checkpoint.format.commit_header import Seal, encode_seal
from hpctrain.checkpoint.format.content_hash import hash_of
from hpctrain.checkpoint.loading.check_structure import check_sealed
from hpctrain.checkpoint.planning.hdf5_skeleton import Skeleton
from hpctrain.checkpoint.retention.file_recycling import take_spare


def make_room(directory: Path, partial: Path, *, folder: bool, spare_bytes: int | None = None) -> list[str]:
    """Make the directory, remove what killed saves left in it, and begin the partial checkpoint, if it is a folder, or
    there is a spare file whose room it can take.

    spare_bytes: of that room, as many as it needs; None: spare files are removed with the rest. What could not be
    removed is returned as text: it is no reason not to save.
    """
    with explained(action="write checkpoints to", path=directory):
        missing = [place for place in (directory, *directory.parents) if not place.is_dir()]
        directory.mkdir(parents=True, exist_ok=True)
        for place in missing:  # the names of all of them, not only of the last
            sync_directory(place.parent)
        if spare_bytes is not None:
            take_spare(directory, partial, file_bytes=spare_bytes)
        notes = remove_partial_files(directory, but=partial)
        if folder:
            partial.mkdir()
    return notes


def create_file(path: Path, *, file_bytes: int) -> None:
    """Create a file of its full length, without content, with room on disk for it. It may be there already, made to be
    striped, or in a spare file's room."""
    with explained(action="create", path=path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            allocate(fd, num_bytes=file_bytes)
        finally:
            os.close(fd)


def seal_file(path: Path, *, skeleton: Skeleton, metadata: memoryview) -> None:
    """Write metadata and seal of the main file, flush it, and read back all that is not content.

    All ranks' content is on disk by now. The seal counts for nobody before the checkpoint has its name.
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
    check_sealed(path, seal=seal, structure=[(offset, len(data)) for offset, data in skeleton.stretches])


def flush_folder(folder: Path) -> None:
    """The names of the files in it are on disk when it returns."""
    with explained(action="write to disk", path=folder):
        sync_directory(folder)


def rename_finished(partial: Path, final: Path, *, unique: str) -> None:
    """The commit: before it nothing has changed for anyone who looks for checkpoints, after it all has.

    A checkpoint of the same step keeps a name under which it is found until the new one has its own. What is left of
    it afterwards, the next save removes.
    """
    step_forms = [final.with_name(name) for name in _forms(final.name)]
    replaced: list[tuple[Path, Path]] = []
    with explained(action="rename the finished checkpoint to", path=final):
        for existing in step_forms:
            # A file takes a file's place in one step; a folder cannot.
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
    with explained(action="write to disk that the checkpoint is called", path=final):
        sync_directory(final.parent)
    for _, aside in replaced:
        with suppress(OSError):
            remove(aside)


def _forms(name: str) -> Sequence[str]:
    """The names that a checkpoint of this one's step may have: a file's, a folder's."""
    step = int(name.removesuffix(".h5").removeprefix("step-"))
    return file_name(step), folder_name(step)
