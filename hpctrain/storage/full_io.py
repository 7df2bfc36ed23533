"""Complete reads and writes at a file offset, and files that are replaced as a whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_fully(fd: int, data: memoryview, *, offset: int) -> None:
    """Writes all of `data`, a view of bytes, at file offset `offset`, with as many calls of pwrite as needed.

    Raises OSError, also if the filesystem writes 0 bytes without an error. Python itself retries after EINTR.
    """
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the filesystem wrote 0 bytes")
        data, offset = data[written:], offset + written


def read_up_to(fd: int, buffer: memoryview, *, offset: int) -> int:
    """Fills `buffer`, a writable view of bytes, from file offset `offset`, or reads to the end of the file.

    Returns the number of bytes read. Raises OSError.
    """
    total = 0
    while total < buffer.nbytes:
        count = os.preadv(fd, [buffer[total:]], offset + total)
        if count == 0:
            break
        total += count
    return total


def sync_directory(directory: Path) -> None:
    """Flushes a directory (fsync). Afterwards a rename in the directory is on disk. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, content: bytes, *, partial: Path, durable: bool = False) -> None:
    """Writes `content` to the file `path` so that readers see either the old or the whole new file. Raises OSError.

    The content is first written to `partial`, which is then renamed. `partial` is a path in the same directory that no
    other process uses. With `durable`, the content is flushed to disk before the rename; the rename itself is on disk
    after `sync_directory`.
    """
    with partial.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)
