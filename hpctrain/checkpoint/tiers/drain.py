"""Copies a finished checkpoint file in pieces of bounded size: hashed, rate-limited, and flushed to disk.

Not collective: the leader of a node, its lowest rank, does this in the background.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import xxhash

from hpctrain.checkpoint.files.checkpoint_names import (
    finished_newest_first,
    folder_name,
    partial_name,
    remove,
)
from hpctrain.checkpoint.files.io_errors import explained, reason_of
from hpctrain.checkpoint.format.metadata import UnknownFormatError
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.saving.rank_file_work import flush_folder, make_room, rename_finished
from hpctrain.errors import CheckpointError
from hpctrain.storage import write_fully

COPY_CHUNK_BYTES = 4 << 20
# Data is flushed after every so many bytes, which bounds the dirty pages, and shows that the disk is making progress:
# a single long fsync at the end could not be distinguished from a dead disk.
SYNC_BYTES = 64 << 20


class UnreadableError(CheckpointError):
    """Raised if the file to be copied cannot be read or is damaged. Another copy of the file may be undamaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainedFile:
    """Result of copying a file: its length in bytes, its hash, and the time that the copy took.

    The hash is the xxh3_64 of all bytes, 16 hex digits. The time, in seconds, includes fsync.
    """

    num_bytes: int
    digest: str
    seconds: float


@final
class Pace:
    """Rate limiter: sleeps to keep the average rate at or below `limit_mb_per_s`, in 10^6 bytes/s; None: no limit."""

    def __init__(self, *, limit_mb_per_s: float | None) -> None:
        self._limit = limit_mb_per_s
        self._begin_s = time.monotonic()
        self._passed_bytes = 0

    def passed(self, num_bytes: int) -> None:
        """Counts `num_bytes` transferred bytes and sleeps until the rate allows the next bytes."""
        if self._limit is None:
            return
        self._passed_bytes += num_bytes
        due_s = self._begin_s + self._passed_bytes / (self._limit * 1e6)
        delay_s = due_s - time.monotonic()
        if delay_s > 0:
            time.sleep(delay_s)
        elif delay_s < -1.0:  # delayed for another reason: do not catch up in one burst
            self._begin_s -= delay_s


def file_pieces(path: Path, *, chunk_bytes: int) -> Iterator[memoryview]:
    """Yields the bytes of a file in pieces of at most `chunk_bytes` bytes, in order.

    The pieces are views of one reused buffer: each is valid until the next one is yielded. Raises UnreadableError if
    the file cannot be read, or if its length changes meanwhile.
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
        raise UnreadableError(
            f"{path} was {num_bytes} bytes long and ended at byte {position}: did another program change it?"
        )


def _read_some(fd: int, buffer: memoryview, *, offset: int, path: Path) -> int:
    try:
        return os.preadv(fd, [buffer], offset)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {reason_of(error)}") from error


@final
class NewFile:
    """A new file that is written sequentially and hashed. Its methods raise CheckpointError.

    As a context manager it removes the file at the end unless `finish` was called.
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
        """Appends `piece`, a view of bytes, to the file."""
        with explained(action="write", path=self._path):
            write_fully(self._fd, piece, offset=self._position)
            self._digest.update(piece)
            self._position += piece.nbytes
            if self._position - self._synced >= SYNC_BYTES:
                os.fdatasync(self._fd)
                # Not read again soon: keep the page cache for the training data.
                os.posix_fadvise(
                    self._fd, self._synced, self._position - self._synced, os.POSIX_FADV_DONTNEED
                )
                self._synced = self._position

    def digest(self) -> str:
        """Returns the hash of the bytes written so far: xxh3_64, 16 hex digits."""
        return str(self._digest.hexdigest())

    def finish(self) -> None:
        """Flushes and closes the file, which is then kept."""
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
    """Copies `source` to the new file `target` and flushes it to disk; the caller flushes the directory.

    Uses COPY_CHUNK_BYTES of memory.

    Args:
        source: The file to copy.
        target: The new file, which is removed if this raises.
        expected: Required hash of the content; "": any.
        pace: Rate limiter; None: no limit.
        on_bytes: Called with the length of each piece. The function may raise to stop the copy.

    Raises:
        UnreadableError: If `source` cannot be read or is damaged.
        CheckpointError: If `target` cannot be written.
    """
    begin_s = time.perf_counter()
    with NewFile(target) as copy:
        for piece in file_pieces(source, chunk_bytes=COPY_CHUNK_BYTES):
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


# Creates and commits the folder in the shared directory to which a checkpoint is drained. Rank 0; not
# collective.


def prepare_target(shared: Path, *, step: int) -> Path:
    """Creates a folder in `shared`, under a temporary name, to which a checkpoint's files are copied from the nodes.

    Returns the path of the folder. Also creates the shared folder `shared` if necessary, and removes incomplete
    checkpoints of killed saves from it. Raises CheckpointError.
    """
    partial = shared / partial_name(folder_name(step), unique=secrets.token_hex(8))
    make_room(shared, partial, folder=True)
    return partial


def discard_target(partial: Path) -> None:
    """Removes `partial`, a checkpoint that was not copied completely to the shared folder. Ignores errors."""
    with suppress(OSError):
        remove(partial)


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """Result of `commit_target`: the finished checkpoint, and the total length of its files in bytes.

    If the files that were copied to the shared folder are damaged, `path` is None and `reason` describes the damage.
    """

    path: Path | None
    num_bytes: int = 0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        path = None if self.path is None else str(self.path)
        return {"path": path, "num_bytes": self.num_bytes, "reason": self.reason}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Committed:
        path = None if value["path"] is None else Path(value["path"])
        return cls(path=path, num_bytes=value["num_bytes"], reason=value["reason"])


def commit_target(partial: Path, *, step: int, save_id: str) -> Committed:
    """Verifies the structure of a checkpoint that was copied to the shared folder, and renames it to its final name.

    `partial` is the folder under its temporary name, and `save_id` the id that the save must have. An existing
    checkpoint of the same step is replaced. Raises CheckpointError if the shared folder cannot be written.
    """
    flush_folder(partial)
    try:
        structure = read_structure(partial)
        found = structure.metadata
        if (found.step, found.id) != (step, save_id):
            raise CheckpointError(
                f"the copy holds save {found.id} of step {found.step}, not {save_id} of step {step}"
            )
    except CheckpointError as error:
        return Committed(path=None, reason=str(error))
    final = partial.with_name(folder_name(step))
    rename_finished(partial, final, unique=secrets.token_hex(8))
    num_bytes = structure.main_bytes + sum(part.num_bytes for part in structure.metadata.parts)
    return Committed(path=final, num_bytes=num_bytes)


def newest_sound(shared: Path) -> tuple[int, float] | None:
    """Returns step and creation time of the newest checkpoint in `shared` whose structure is undamaged, or None.

    The time is in seconds since 1970. Raises CheckpointError if the folder cannot be read, and UnknownFormatError for
    an unknown format version.
    """
    for path in finished_newest_first(shared):
        try:
            metadata = read_structure(path).metadata
        except UnknownFormatError:
            raise
        except CheckpointError:
            continue  # the load reports it
        return metadata.step, metadata.created_unix_s
    return None
