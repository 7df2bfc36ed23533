"""Copies a checkpoint to another directory, completely and verified, or not at all. The ranks share the work."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.files.checkpoint_names import (
    file_name,
    folder_name,
    part_path,
    partial_name,
    remove,
)
from hpctrain.checkpoint.files.io_errors import explained, read_fully
from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.loading.check_structure import opened
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, open_checkpoint
from hpctrain.checkpoint.operations.import_tensors import refuse_existing
from hpctrain.checkpoint.operations.mapped_tensors import map_items, save_in_files
from hpctrain.checkpoint.operations.verify import verify
from hpctrain.checkpoint.saving.commit import create_file, flush_folder, rename_finished
from hpctrain.comm import Collective, agreed, on_rank_0
from hpctrain.errors import CheckpointError, HpctrainError, UsageError
from hpctrain.storage import write_fully

RANGE_BYTES = 64 << 20  # length of the byte ranges that are dealt to the ranks, one after another
_BUFFER_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCopy:
    """Result of a copy. num_bytes: total length of its files. note: how it was made."""

    path: Path
    num_bytes: int
    note: str


def copy_checkpoint(
    source: Path | str,
    directory: Path | str,
    *,
    comm: Collective,
    files: int | None = None,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> CheckpointCopy:
    """Copies the checkpoint `source`, or the newest one of a directory, to `directory/step-<its step>`. Collective.

    The copy gets its name after it is on disk and verified. Other checkpoints in `directory` are kept. Each rank uses
    a buffer of 8 MiB, and an extent of 4 MiB while verifying.

    Args:
        files: None: copies the files as they are, then reads the copy back and verifies every byte. 1: writes one
            file. K: writes a folder of K files. For a number, the source is verified and then saved again from memory
            mapped to its files.
        replace: replace a checkpoint of the same step.
        progress: called with the bytes of this rank's share written and verified so far, and with twice the share.
            Not called while saving again.
        options: options of `save`; only if `files` is a number.

    Raises on every rank, after removing the partial copy: CheckpointError for damage and for files that cannot be read
    or written, UsageError for an invalid argument.
    """
    directory = Path(directory)
    checkpoint = open_checkpoint(source, comm=comm)

    def check() -> None:
        if files is not None and files < 1:
            raise UsageError(f"files = {files}: give an integer of at least 1")
        if files is None and options:
            raise UsageError(
                f"{', '.join(options)}: allowed only if `files` is given, so that the checkpoint is saved again"
            )
        if directory.exists() and directory.samefile(checkpoint.path.parent):
            raise UsageError(f"{checkpoint.path} is in {directory} already: choose another directory")
        refuse_existing(directory, step=checkpoint.step, replace=replace)

    on_rank_0(comm, check, os_error=CheckpointError)
    if files is None:
        return _copy_files(checkpoint, directory, comm=comm, progress=progress)
    (found,) = verify(checkpoint.path, comm=comm, progress=lambda done, total: progress(done, 2 * total))
    if found.damage:
        raise CheckpointError(f"{checkpoint.path} is damaged: {found.damage[0]}", agreed=True)
    state = State(items=(), document=checkpoint.document, parent=checkpoint.metadata.parent)
    saved = save_in_files(
        lambda rank, num_ranks: dataclasses.replace(
            state, items=map_items(checkpoint, rank=rank, num_ranks=num_ranks)
        ),
        directory=directory,
        step=checkpoint.step,
        files=files,
        comm=comm,
        **options,
    )
    return CheckpointCopy(path=saved.path, num_bytes=saved.bytes, note=f"saved again: {saved.note}")


def _copy_files(
    checkpoint: Checkpoint, directory: Path, *, comm: Collective, progress: Callable[[int, int], None]
) -> CheckpointCopy:
    """Copies the files as they are. Collective."""
    sources = checkpoint.files
    prepared = on_rank_0(
        comm, lambda: _prepare(checkpoint, directory, sources=sources), os_error=CheckpointError
    )
    partial, sizes = Path(prepared["partial"]), prepared["sizes"]
    targets = [part_path(partial, number) for number in range(len(sources))]
    try:
        agreed(
            comm,
            lambda: _copy_ranges(sources, targets, sizes=sizes, comm=comm, progress=progress),
            os_error=CheckpointError,
        )
        (found,) = verify(partial, comm=comm, progress=lambda done, total: progress(total + done, 2 * total))
        if found.damage:
            raise CheckpointError(
                f"{checkpoint.path} was not copied: the copy is damaged: {found.damage[0]}: verify the original",
                agreed=True,
            )
        final = Path(
            on_rank_0(comm, lambda: _commit(checkpoint, directory, partial), os_error=CheckpointError)
        )
    except BaseException:  # also KeyboardInterrupt: a partial copy may be large
        if comm.rank == 0:
            with suppress(OSError):
                remove(partial)
        raise
    return CheckpointCopy(path=final, num_bytes=sum(sizes), note="byte for byte")


def _prepare(checkpoint: Checkpoint, directory: Path, *, sources: Sequence[Path]) -> dict[str, Any]:
    """Creates files of the right length, without content, under a temporary name. Rank 0. Returns "partial", the path,
    and "sizes", the lengths."""
    is_folder = checkpoint.path.is_dir()
    name = folder_name(checkpoint.step) if is_folder else file_name(checkpoint.step)
    partial = directory / partial_name(name, unique=secrets.token_hex(8))
    with explained(action="copy the checkpoint to", path=directory):
        directory.mkdir(parents=True, exist_ok=True)
        sizes = [path.stat().st_size for path in sources]
        try:
            if is_folder:
                partial.mkdir()
            for number, num_bytes in enumerate(sizes):
                create_file(part_path(partial, number), file_bytes=num_bytes)
        except (HpctrainError, OSError):
            with suppress(OSError):
                remove(partial)
            raise
    return {"partial": str(partial), "sizes": sizes}


def _copy_ranges(
    sources: Sequence[Path],
    targets: Sequence[Path],
    *,
    sizes: Sequence[int],
    comm: Collective,
    progress: Callable[[int, int], None],
) -> None:
    """Copies this rank's byte ranges of each file and flushes them to disk."""
    byte_ranges = [
        (number, begin, min(begin + RANGE_BYTES, num_bytes))
        for number, num_bytes in enumerate(sizes)
        for begin in range(0, num_bytes, RANGE_BYTES)
    ][comm.rank :: comm.num_ranks]
    total, done = sum(end - begin for _, begin, end in byte_ranges), 0
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    for number in sorted({number for number, _, _ in byte_ranges}):
        source, target = sources[number], targets[number]
        with opened(source) as read_fd, explained(action="write", path=target):
            write_fd = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for _, begin, end in (entry for entry in byte_ranges if entry[0] == number):
                    for offset in range(begin, end, _BUFFER_BYTES):
                        piece = buffer[: min(_BUFFER_BYTES, end - offset)]
                        with explained(action="read", path=source):
                            read_fully(read_fd, piece, offset=offset)
                        write_fully(write_fd, piece, offset=offset)
                        done += piece.nbytes
                        progress(done, 2 * total)
                os.fsync(write_fd)
            finally:
                os.close(write_fd)


def _commit(checkpoint: Checkpoint, directory: Path, partial: Path) -> str:
    """Renames the copy to its final name, replacing an older checkpoint of that name. Rank 0."""
    name = folder_name(checkpoint.step) if partial.is_dir() else file_name(checkpoint.step)
    if partial.is_dir():
        flush_folder(partial)
    final = directory / name
    rename_finished(partial, final, unique=partial.name[-16:])
    return str(final)
