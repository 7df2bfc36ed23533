"""Whole reads and whole writes at a place in a file, and the errors of both in plain words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import CheckpointError

_REMEDY = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: free some space, or keep fewer checkpoints",
    errno.EFBIG: "a limit on file sizes is set: see `ulimit -f` and the filesystem's own",
    errno.EACCES: "give this user the permission, or choose another directory",
    errno.EPERM: "give this user the permission, or choose another directory",
    errno.EROFS: "the filesystem is mounted read-only: choose another directory",
    errno.ENOENT: "does every node see this directory?",
    errno.EIO: "the storage reports a failure: see the system's log",
    errno.ESTALE: "the network filesystem lost the file: is it still mounted?",
    errno.ENOTDIR: "something in this path is a file, not a directory",
    errno.EEXIST: "something in this path is a file, not a directory",
}


@contextmanager
def explained(*, action: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside into a CheckpointError that says what was tried and what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {action} {path}: {reason_of(error)}") from error


def reason_of(error: OSError) -> str:
    """Why, and what to do about it where we know."""
    if not error.errno:
        return str(error)
    remedy = _REMEDY.get(error.errno)
    return os.strerror(error.errno) + (f" ({remedy})" if remedy else "")


def write_fully(fd: int, data: memoryview, *, offset: int) -> None:
    """pwrite until all of `data`, a view of bytes, is written. EINTR is repeated by Python itself.

    Raises OSError, also when the filesystem takes nothing without saying why.
    """
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the filesystem took 0 bytes of a write")
        data, offset = data[written:], offset + written


def read_fully(fd: int, buffer: memoryview, *, offset: int) -> None:
    """pread until `buffer`, a writable view of bytes, is full. Raises OSError, and CheckpointError at the
    file's end."""
    while buffer.nbytes:
        count = os.preadv(fd, [buffer], offset)
        if count == 0:
            raise CheckpointError(f"the file ends at byte {offset}, {buffer.nbytes} bytes too early")
        buffer, offset = buffer[count:], offset + count


def sync_directory(directory: Path) -> None:
    """fsync of a directory: a rename in it is on disk afterwards. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
