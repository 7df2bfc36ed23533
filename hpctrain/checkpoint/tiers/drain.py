"""Copy a finished file to another place: in pieces of bounded size, hashed, at a bounded pace, on disk at the end.

Not collective: this is what a node's leader does in the background.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import xxhash

from hpctrain.checkpoint.files.full_io import explained, reason_of, write_fully
from hpctrain.errors import CheckpointError

COPY_CHUNK_BYTES = 4 << 20
# Written so far is sent to the disk in stretches: one fsync of it all at the end would take long, during which
# nobody can tell a slow disk from a dead one; and dirty memory stays bounded.
SYNC_BYTES = 64 << 20


class UnreadableError(CheckpointError):
    """The file to copy cannot be read, or is not what was written: another copy of it may be better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainedFile:
    """num_bytes: of the file. digest: xxh3_64 of all of it, 16 hex digits. seconds: fsync included."""

    num_bytes: int
    digest: str
    seconds: float


@final
class Pace:
    """Sleeps so that no more than `limit_mb_per_s` (1 MB = 10^6 bytes) pass on average; None: no limit."""

    def __init__(self, *, limit_mb_per_s: float | None) -> None:
        self._limit = limit_mb_per_s
        self._begin_s = time.monotonic()
        self._passed_bytes = 0

    def passed(self, num_bytes: int) -> None:
        """`num_bytes` have passed. Sleeps until more may."""
        if self._limit is None:
            return
        self._passed_bytes += num_bytes
        due_s = self._begin_s + self._passed_bytes / (self._limit * 1e6)
        delay_s = due_s - time.monotonic()
        if delay_s > 0:
            time.sleep(delay_s)
        elif delay_s < -1.0:  # we were held up elsewhere: no right to catch up in one burst
            self._begin_s -= delay_s


def pieces_of(path: Path, *, chunk_bytes: int) -> Iterator[memoryview]:
    """The file's bytes in order, in views of one reused buffer: each is valid until the next is taken.

    Raises UnreadableError, also when the file turns out shorter or longer than it was when it was opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise UnreadableError(f"cannot open {path}: {reason_of(error)}") from error
    try:
        num_bytes, position = os.fstat(fd).st_size, 0
        buffer = memoryview(bytearray(min(chunk_bytes, max(num_bytes, 1))))
        while count := _read_some(fd, buffer, offset=position, path=path):
            yield buffer[:count]
            position += count
    finally:
        os.close(fd)
    if position != num_bytes:
        raise UnreadableError(f"{path} was {num_bytes} bytes long and ended at byte {position}")


def _read_some(fd: int, buffer: memoryview, *, offset: int, path: Path) -> int:
    try:
        return os.preadv(fd, [buffer], offset)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {reason_of(error)}") from error


@final
class NewFile:
    """A file being written from its begin to its end, hashed on the way. Raises CheckpointError.

    As a context manager: what was not finished by `finish` is removed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = xxhash.xxh3_64()
        self._position = 0
        self._synced = 0
        self._finished = False
        with explained(action="create", path=path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o666)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if not self._finished:
            with suppress(OSError):
                self._path.unlink()

    @property
    def num_bytes(self) -> int:
        return self._position

    def write(self, piece: memoryview) -> None:
        """Append `piece`, a view of bytes."""
        with explained(action="write", path=self._path):
            write_fully(self._fd, piece, offset=self._position)
            self._digest.update(piece)
            self._position += piece.nbytes
            if self._position - self._synced >= SYNC_BYTES:
                os.fdatasync(self._fd)
                # Nobody reads it soon: leave the page cache to the training's data.
                os.posix_fadvise(
                    self._fd, self._synced, self._position - self._synced, os.POSIX_FADV_DONTNEED
                )
                self._synced = self._position

    def digest(self) -> str:
        """Of what was written so far."""
        return str(self._digest.hexdigest())

    def finish(self) -> None:
        """fsync and close: the file stays."""
        with explained(action="write to disk", path=self._path):
            os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)
        self._finished = True


def copy_file(
    source: Path,
    target: Path,
    *,
    expected: str = "",
    pace: Pace | None = None,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> DrainedFile:
    """Copy `source` to the new file `target`, flushed to disk (the directory's entry is the caller's).

    expected: the digest that it must have; "" for any. on_bytes: told after each piece; may raise to stop.
    Raises UnreadableError for what is wrong with `source`, else CheckpointError, with no `target` left behind.
    Memory: one piece of COPY_CHUNK_BYTES.
    """
    begin_s = time.perf_counter()
    with NewFile(target) as copy:
        for piece in pieces_of(source, chunk_bytes=COPY_CHUNK_BYTES):
            copy.write(piece)
            on_bytes(piece.nbytes)
            if pace is not None:
                pace.passed(piece.nbytes)
        if expected and copy.digest() != expected:
            raise UnreadableError(
                f"{source} is damaged: its hash is {copy.digest()}, it was written with {expected}"
            )
        copy.finish()
        return DrainedFile(
            num_bytes=copy.num_bytes, digest=copy.digest(), seconds=time.perf_counter() - begin_s
        )
