"""Deletes checkpoints that are no longer kept, after a newer one was committed. Done by one rank; not collective."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import signal
import stat
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from hpctrain.checkpoint.files.checkpoint_names import (
    file_name,
    finished_newest_first,
    folder_name,
    is_spare,
    main_file,
    partial_files,
    partial_name,
    spare_name,
    step_of,
)
from hpctrain.checkpoint.files.direct_io import declare_empty
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.retention.policy import Best, Retention, steps_to_delete
from hpctrain.errors import HpctrainError
from hpctrain.storage import sync_directory

# Reuses the disk blocks of a deleted checkpoint for the next one. Done by rank 0; not collective.
#
# A deleted checkpoint becomes a hidden spare file, into whose blocks the next save writes. This is nearly
# twice as fast as writing to newly allocated blocks (ext4 mounted with `discard`: 512 MiB in 0.16 to 0.24 s
# instead of 0.29 to 0.39), and saves the 0.1 s of a deletion. The peak of disk usage is unchanged: any save
# that deletes nothing before its commit needs space for one checkpoint more than are kept.


def set_aside(path: Path) -> bool:
    """Turns the checkpoint at `path` into a spare file, whose disk blocks a later save reuses, by renaming it.

    Returns False, without effect, unless it is a plain file with one name. The content stays for now, for readers
    that have the file open. Raises OSError.
    """
    if not _is_plain(path.lstat()):
        return False
    name = file_name(step_of(path) or 0)  # `path` may also have the name of a replaced checkpoint
    os.rename(path, path.with_name(spare_name(name, unique=secrets.token_hex(8))))
    return True


def take_spare(directory: Path, partial: Path, *, file_bytes: int) -> None:
    """Renames a usable spare file, if there is one, to `partial`, so that the new checkpoint reuses its disk blocks.

    Its first `file_bytes` bytes then read as zeros, as in a new file; the file may be longer. If there are spare
    files but none is usable, `partial` is created empty. Raises OSError if it cannot be created, and
    CheckpointError if the directory cannot be listed.
    """
    spares = list(filter(is_spare, partial_files(directory)))
    if spares:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    for path in spares:
        if _taken(path, partial, file_bytes=file_bytes):
            return


def remove_spares(directory: Path) -> None:
    """Deletes the spare files of a directory, which saves with `recycle=True` keep to reuse disk blocks.

    Not collective. Call it on one rank after the last save. Errors are ignored.

    Args:
        directory: Directory of the checkpoints.
    """
    with suppress(HpctrainError):
        for path in filter(is_spare, partial_files(directory)):
            with suppress(OSError):
                path.unlink()


def _taken(spare: Path, partial: Path, *, file_bytes: int) -> bool:
    """Replaces the new file `partial` by a spare file. Returns False if the spare file cannot be used."""
    # An error only means that this file is not reused; it is removed with the other partial files.
    with suppress(OSError):
        fd = os.open(spare, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not _is_plain(os.fstat(fd)) or _rights(fd) != _rights(partial) or not _is_ours_alone(fd):
                return False
            # The renaming to a spare file must be on disk before the content is erased.
            sync_directory(spare.parent)
            if not declare_empty(fd, num_bytes=file_bytes):
                return False
            os.rename(spare, partial)
            return True
        finally:
            os.close(fd)
    return False


def _is_plain(status: os.stat_result) -> bool:
    """Returns True for a regular file with one hard link; through another link the content would still be visible."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _rights(file: int | Path) -> tuple[int, int, int, dict[str, bytes]]:
    """Returns owner, group, mode, and the extended attributes, which include access control lists."""
    status, attached = os.stat(file), {}
    try:
        attached = {name: os.getxattr(file, name) for name in os.listxattr(file)}
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:  # not supported: there are none
            raise
    return status.st_uid, status.st_gid, status.st_mode, attached


def _is_ours_alone(fd: int) -> bool:
    """Returns True if no other process has the file open or mapped: only then the kernel grants a write lease."""
    try:
        # If another process opens the file meanwhile, the kernel sends a signal. The default, SIGIO, ends the process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def retain(directory: Path, *, saved: Path, retention: Retention, recycle: bool = False) -> list[str]:
    """Deletes the checkpoints of `directory` that `retention` does not keep. Not collective.

    `saved` is the new checkpoint, already committed. `recycle` keeps one of the deleted files as a spare file for
    the next save. Returns errors as text, since they must not fail the save.
    """
    paths, notes = deletable(directory, saved=saved, retention=retention)
    for path in paths:
        try:
            if recycle and set_aside(path):
                recycle = False
            else:
                delete_checkpoint(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"could not delete {path.name}: {error.strerror or error}")
    return notes


def deletable(directory: Path, *, saved: Path, retention: Retention) -> tuple[list[Path], list[str]]:
    """Returns the checkpoints that `retain` deletes, oldest first, and notes for the user.

    With `retention.best`, a checkpoint whose metric cannot be read is kept, since it might be the best one.
    """
    try:
        paths = finished_newest_first(directory)
    except HpctrainError as error:
        return [], [f"older checkpoints were kept: {error}"]
    notes: list[str] = []
    by_step: dict[int, list[Path]] = {}  # a save killed while replacing may have left two of one step
    for path in paths:
        by_step.setdefault(step_of(path) or 0, []).append(path)
    newest = step_of(saved) or 0
    to_delete = steps_to_delete(by_step, saved=newest, keep=retention)
    if to_delete and retention.best is not None:
        quality, unknown = _quality(by_step, best=retention.best, saved=newest, notes=notes)
        to_delete = steps_to_delete(by_step, saved=newest, keep=retention, quality=quality)
        to_delete = [step for step in to_delete if step not in unknown]
    return [path for step in to_delete for path in by_step[step]], notes


def delete_checkpoint(path: Path) -> None:
    """Deletes a finished checkpoint, a file or a folder. Raises OSError, but not for a file that does not exist.

    A folder is first renamed to a partial checkpoint. So a partly deleted folder is never taken for a checkpoint,
    and the next save removes the rest.
    """
    if path.is_symlink() or not path.is_dir():  # of a symbolic link, delete only the link
        path.unlink(missing_ok=True)
        return
    name = folder_name(step_of(path) or 0)  # `path` may also have the name of a replaced checkpoint
    doomed = path.with_name(partial_name(name, unique=secrets.token_hex(8)))
    os.rename(path, doomed)
    sync_directory(path.parent)
    shutil.rmtree(doomed)


def _quality(
    by_step: dict[int, list[Path]], *, best: Best, saved: int, notes: list[str]
) -> tuple[dict[int, float], set[int]]:
    """Returns the metric's value by step, and the steps whose checkpoint cannot be read. Appends errors to `notes`."""
    quality: dict[int, float] = {}
    unknown: set[int] = set()
    for step, paths in by_step.items():
        if step > saved:
            continue
        try:
            status = main_file(paths[0]).stat()
            found = _numbers(paths[0], status.st_mtime_ns, status.st_size).get(best.metric)
        except (HpctrainError, OSError, OverflowError) as error:
            unknown.add(step)
            notes.append(f"kept {paths[0].name}, whose {best.metric} cannot be read: {error}")
            continue
        if found is not None:
            quality[step] = found
    if not quality and not unknown:
        notes.append(f"no checkpoint has the metric {best.metric!r} yet, so none is kept for being the best")
    return quality, unknown


@lru_cache(maxsize=1024)
def _numbers(path: Path, mtime_ns: int, file_bytes: int) -> dict[str, float]:
    """Returns the numbers in the entry `quality` of a checkpoint's document.

    The result is cached, since each save needs the numbers of all checkpoints.
    """
    quality = read_structure(path).metadata.document.get("quality")
    if not isinstance(quality, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in quality.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
