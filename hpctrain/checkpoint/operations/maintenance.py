"""Operations on whole checkpoints: verify, copy and prune."""

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
    finished_newest_first,
    folder_name,
    part_path,
    partial_files,
    partial_name,
    remove,
)
from hpctrain.checkpoint.files.io_errors import explained, read_fully, reason_of
from hpctrain.checkpoint.format.state import State
from hpctrain.checkpoint.loading.check_structure import ContentFiles, is_checkpoint, opened, read_structure
from hpctrain.checkpoint.loading.checkpoint import Checkpoint, from_rank_0, open_checkpoint
from hpctrain.checkpoint.loading.verified_content import find_damage
from hpctrain.checkpoint.operations.import_tensors import map_items, refuse_existing, save_in_files
from hpctrain.checkpoint.retention.delete_old import deletable, delete_checkpoint
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.checkpoint.saving.rank_file_work import create_file, flush_folder, rename_finished
from hpctrain.comm import Collective, agreed, all_gather_json, doing, on_rank_0
from hpctrain.errors import CheckpointError, HpctrainError, UsageError
from hpctrain.storage import write_fully

# Verifies every byte of checkpoints by hashing: the command `hpctrain checkpoint verify`.


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Result of verifying one checkpoint.

    Attributes:
        path: The checkpoint's file or folder.
        file_bytes: Total length of the checkpoint's files.
        damage: One line of text per damaged file or damaged region of a tensor; empty if every byte is as it was
            written.
    """

    path: Path
    file_bytes: int
    damage: tuple[str, ...]


def verify(
    path_or_directory: Path | str,
    *,
    comm: Collective,
    progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> list[Verified]:
    """Reads every byte of a checkpoint, or of all checkpoints in a directory, and compares it with the hashes.

    Collective. The ranks share the work.

    Args:
        path_or_directory: A checkpoint, or a directory of checkpoints.
        comm: The ranks that share the work.
        progress: Called with the number of bytes of this rank's share hashed so far, and with the (approximate)
            size of the share, for each checkpoint.

    Returns:
        A result per checkpoint, newest first. Damage is part of the result, not an error.

    Raises:
        CheckpointError: On every rank, if there is no checkpoint.
    """
    paths = on_rank_0(comm, lambda: _find(Path(path_or_directory)))
    return [_verify_file(Path(path), comm=comm, progress=progress) for path in paths]


def _find(path: Path) -> list[str]:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    is_directory = path.is_dir() and not is_checkpoint(path)
    paths = finished_newest_first(path) if is_directory else [path]
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return [str(found) for found in paths]


def _verify_file(path: Path, *, comm: Collective, progress: Callable[[int, int], None]) -> Verified:
    try:
        checkpoint = from_rank_0(comm, lambda: read_structure(path))
    except CheckpointError as error:
        found_bytes = on_rank_0(comm, lambda: _bytes_found(path))
        return Verified(path=path, file_bytes=found_bytes, damage=(str(error),))

    def own_part() -> list[str]:
        tensors = list(checkpoint.tensors.values())
        with checkpoint.named(), ContentFiles(checkpoint.files) as files:
            share_bytes = sum(tensor.num_bytes for tensor in tensors) // comm.num_ranks
            found = find_damage(
                files, tensors=tensors, rank=comm.rank, num_ranks=comm.num_ranks,
                progress=lambda done_bytes: progress(min(done_bytes, share_bytes), share_bytes),
            )  # fmt: skip
            return [str(damage) for damage in found]

    with doing(comm, f"verifying checkpoint {path}"):
        by_rank = all_gather_json(comm, agreed(comm, own_part))
    damage = tuple(sorted(line for lines in by_rank for line in lines))
    return Verified(path=path, file_bytes=checkpoint.file_bytes, damage=damage)


def _bytes_found(path: Path) -> int:
    """Returns the total length of the existing files of a checkpoint whose structure is damaged."""
    files = [path] if path.is_file() else path.glob("data-*.h5")
    return sum(file.stat().st_size for file in files if file.is_file())


# Copies a checkpoint to another directory, completely and verified, or not at all. The ranks share the
# work.


RANGE_BYTES = 64 << 20  # length of the byte ranges, which are assigned to the ranks in turn
_BUFFER_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCopy:
    """Result of `copy_checkpoint`: the new checkpoint, the total length of its files, and how the copy was made."""

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
    """Copies a checkpoint to `directory/step-<step>`, completely and verified, or not at all. Collective.

    The copy gets its name after it is on disk and verified. Other checkpoints in `directory` are kept. The step is that
    of the source. Each rank uses a buffer of 8 MiB, and 4 MiB more while verifying.

    Args:
        source: A checkpoint, or a directory of checkpoints, whose newest one is copied.
        directory: Directory of checkpoints in which the copy is created.
        comm: The ranks that share the work.
        files: Number of files of the copy. None: the files are copied as they are, then read back and verified. 1:
            a single file; larger: a folder of that many files. For a number, the source is verified, and the copy is
            saved anew from the memory-mapped files of the source.
        replace: Replace an existing checkpoint of the same step.
        progress: Called with two numbers of bytes: those done so far, and their total. Each byte of this rank's share
            counts twice: when it is written, and when it is verified. Not called while the copy is saved anew.
        **options: Options of `save`. Allowed only if `files` is a number: only then is the copy saved anew.

    Returns:
        Path and size of the copy, and how it was made.

    Raises:
        CheckpointError: On every rank, for damage and for files that cannot be read or written. The partial copy is
            removed.
        UsageError: On every rank, for an invalid argument.
    """
    directory = Path(directory)
    checkpoint = open_checkpoint(source, comm=comm)

    def check() -> None:
        if files is not None and files < 1:
            raise UsageError(f"files = {files}: give an integer of at least 1")
        if files is None and options:
            raise UsageError(
                f"{', '.join(options)}: used only when the checkpoint is written anew: give `files` as well, or leave "
                "the options out"
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
    """Copies the files of a checkpoint to `directory` byte for byte, and verifies the copy. Collective."""
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
                f"{checkpoint.path} was not copied, because the copy was damaged ({found.damage[0]}) and has been "
                "removed: verify the original",
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
    """Creates the files for a copy of a checkpoint, with their final lengths, under a temporary name. For rank 0.

    Returns a dict: "partial" is the path of the copy, and "sizes" are the lengths of the files in bytes.
    """
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
    """Copies this rank's share of the files `sources` to the files `targets`, and flushes it to disk.

    `sizes` are the lengths of the files in bytes. They are divided into byte ranges, which the ranks share.
    """
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
    """Renames the finished copy from `partial` to its final name, and replaces a checkpoint there. For rank 0."""
    name = folder_name(checkpoint.step) if partial.is_dir() else file_name(checkpoint.step)
    if partial.is_dir():
        flush_folder(partial)
    final = directory / name
    rename_finished(partial, final, unique=partial.name[-16:])
    return str(final)


# Deletes checkpoints on the user's command, by the same rules as a run, after verifying the newest one.


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """Result of `prune`.

    Attributes:
        proven: The newest undamaged checkpoint, every byte of which was verified.
        passed_over: For each newer checkpoint, its name and the first error in it. These checkpoints are damaged,
            and are kept.
        kept: Names of the checkpoints that are kept.
        deleted: Names of the checkpoints that were deleted, or with `dry_run` would be.
        freed_bytes: Total length of the deleted checkpoints.
        notes: Errors while deleting.
    """

    proven: Path
    passed_over: tuple[str, ...]
    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    freed_bytes: int
    notes: tuple[str, ...]


def prune(
    directory: Path | str,
    *,
    comm: Collective,
    retention: Retention,
    unfinished: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pruned:
    """Deletes the checkpoints of a directory that `retention` does not keep, after verifying the newest one.

    Collective. First every byte of the newest checkpoint is verified by all ranks together; if it is damaged, the next
    older checkpoint is tried, and so on. The verified checkpoint and all newer checkpoints are kept.

    Args:
        directory: Directory of the checkpoints.
        comm: The ranks that share the verification.
        retention: Which checkpoints are kept.
        unfinished: Also remove incomplete checkpoints of killed saves. Do not use this option while a run may be saving
            there.
        dry_run: Delete nothing, only report what would be deleted.
        progress: Called, while a checkpoint is verified, with the number of bytes of this rank's share hashed so far,
            and with the (approximate) size of the share.

    Returns:
        What was kept and deleted.

    Raises:
        CheckpointError: On every rank, if there is no undamaged checkpoint.
    """
    directory = Path(directory)
    proven, passed_over = _newest_whole(directory, comm=comm, progress=progress)
    outcome = on_rank_0(
        comm,
        lambda: _prune(directory, proven, retention=retention, unfinished=unfinished, dry_run=dry_run),
        os_error=CheckpointError,
    )
    return Pruned(
        proven=proven,
        passed_over=passed_over,
        kept=tuple(outcome["kept"]),
        deleted=tuple(outcome["deleted"]),
        freed_bytes=outcome["freed_bytes"],
        notes=tuple(outcome["notes"]),
    )


def checkpoint_size(path: Path) -> int:
    """Returns the length in bytes of a checkpoint's file, or of all files in its folder.

    Returns 0 if there is no such checkpoint.

    Raises OSError for any other failure.
    """
    with suppress(FileNotFoundError):
        if path.is_dir():
            return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
        return path.stat().st_size
    return 0


def _newest_whole(
    directory: Path, *, comm: Collective, progress: Callable[[int, int], None]
) -> tuple[Path, tuple[str, ...]]:
    """Returns the newest undamaged checkpoint, and the errors of newer, damaged ones. Collective.

    Raises CheckpointError on every rank if there is no undamaged checkpoint.
    """

    def candidates() -> list[str]:
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory: give the one that holds the checkpoints")
        return [str(path) for path in finished_newest_first(directory)]

    damaged: list[str] = []
    for path in map(Path, on_rank_0(comm, candidates, os_error=CheckpointError)):
        (found,) = verify(path, comm=comm, progress=progress)
        if not found.damage:
            return path, tuple(damaged)
        damaged.append(f"{path.name}: {found.damage[0]}")
    what = f"all are damaged: {'; '.join(damaged)}" if damaged else "there is none"
    raise CheckpointError(f"no checkpoint in {directory} was deleted: {what}", agreed=True)


def _prune(
    directory: Path, proven: Path, *, retention: Retention, unfinished: bool, dry_run: bool
) -> dict[str, Any]:
    paths, notes = deletable(directory, saved=proven, retention=retention)
    rest = partial_files(directory) if unfinished else []
    deleted, freed_bytes = [], 0
    for path in [*paths, *rest]:
        try:
            num_bytes = checkpoint_size(path)
            if not dry_run and path in rest:
                remove(path)
            elif not dry_run:
                delete_checkpoint(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"could not delete {path.name}: {reason_of(error)}")
            continue
        deleted.append(path.name)
        freed_bytes += num_bytes
    kept = [path.name for path in finished_newest_first(directory) if path.name not in deleted]
    return {"kept": kept, "deleted": deleted, "freed_bytes": freed_bytes, "notes": notes}
