"""Reuses the disk blocks of a deleted checkpoint for the next one. Done by rank 0; not collective.

A deleted checkpoint becomes a hidden spare file, into whose blocks the next save writes. This is nearly twice as fast
as writing to newly allocated blocks (ext4 mounted with `discard`: 512 MiB in 0.16 to 0.24 s instead of 0.29 to 0.39),
and saves the 0.1 s of a deletion. The peak of disk usage is unchanged: any save that deletes nothing before its commit
needs space for one checkpoint more than are kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import stat
from contextlib import suppress
from pathlib import Path

from hpctrain.checkpoint.files.checkpoint_names import file_name, is_spare, partial_files, spare_name, step_of
from hpctrain.checkpoint.files.syscalls import declare_empty
from hpctrain.errors import HpctrainError
from hpctrain.storage import sync_directory


def set_aside(path: Path) -> bool:
    """Renames the checkpoint at `path` to a spare file. Returns False, without effect, unless it is a plain file.

    The content stays for now, for readers that have the file open. Raises OSError.
    """
    if not _is_plain(path.lstat()):
        return False
    name = file_name(step_of(path) or 0)  # `path` may also have the name of a replaced checkpoint
    os.rename(path, path.with_name(spare_name(name, unique=secrets.token_hex(8))))
    return True


def take_spare(directory: Path, partial: Path, *, file_bytes: int) -> None:
    """Renames a usable spare file, if there is one, to `partial`.

    Its first `file_bytes` bytes then read as zeros, as in a new file; it may be longer. If there are spare files but
    none is usable, `partial` is created empty. Raises OSError if it cannot be created, and CheckpointError if the
    directory cannot be listed.
    """
    spares = list(filter(is_spare, partial_files(directory)))
    if spares:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    for path in spares:
        if _taken(path, partial, file_bytes=file_bytes):
            return


def remove_spares(directory: Path) -> None:
    """Deletes all spare files of the directory. Ignores errors."""
    with suppress(HpctrainError):
        for path in filter(is_spare, partial_files(directory)):
            with suppress(OSError):
                path.unlink()


def _taken(spare: Path, partial: Path, *, file_bytes: int) -> bool:
    """Replaces the new file `partial` by the spare file. Returns False if the spare file cannot be used."""
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
    """True for a regular file with a single hard link: another link would still refer to the content."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _rights(file: int | Path) -> tuple[int, int, int, dict[str, bytes]]:
    """Returns owner, group, mode, and extended attributes, which include access control lists."""
    status, attached = os.stat(file), {}
    try:
        attached = {name: os.getxattr(file, name) for name in os.listxattr(file)}
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:  # not supported: there are none
            raise
    return status.st_uid, status.st_gid, status.st_mode, attached


def _is_ours_alone(fd: int) -> bool:
    """True if no other process has the file open or mapped: only then the kernel grants a write lease."""
    try:
        # If another process opens the file meanwhile, the kernel sends a signal. The default, SIGIO, ends the process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
