"""Converts errors of the system to CheckpointError, with a remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.errors import CheckpointError
from hpctrain.storage import read_up_to

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
    """Context in which an OSError becomes a CheckpointError with the action, the path, the reason and a remedy."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {action} {path}: {reason_of(error)}") from error


def reason_of(error: OSError) -> str:
    """Returns the reason of an error in words, and a remedy if one is known."""
    if not error.errno:
        return str(error)
    remedy = _REMEDY.get(error.errno)
    return os.strerror(error.errno) + (f" ({remedy})" if remedy else "")


def read_fully(fd: int, buffer: memoryview, *, offset: int) -> None:
    """Fills `buffer`, a writable view of bytes, from file offset `offset`.

    Raises OSError, and CheckpointError if the file ends before the buffer is full.
    """
    count = read_up_to(fd, buffer, offset=offset)
    if count < buffer.nbytes:
        raise CheckpointError(
            f"the file ends at byte {offset + count}, {buffer.nbytes - count} bytes too early"
        )
