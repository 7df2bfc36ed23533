"""Copies of shards on node-local storage: the folder that the ranks of a node share, and the thread that copies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import xxhash

from hpctrain.data.format.manifest import Manifest, ShardEntry, write_manifest
from hpctrain.data.format.shard_file import block_ranges, read_bytes
from hpctrain.errors import DataError
from hpctrain.storage import hash_of, write_fully

# The folder on node-local storage in which the ranks of a node share copies of shards.
#
# Each process that uses it holds a lock on it (flock), which the kernel releases when the process ends for
# any reason. A folder without a lock is a leftover, and is removed.


PREFIX = "hpctrain-stage-"
COPYING = ".copying-"
LEAVING = ".leaving-"
_USERS_LOCK = ".users.lock"
_STAGER_LOCK = ".stager.lock"


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """A file of a dataset that is copied to node-local storage.

    `source` is the path of the original file, `name` the file name of the copy, and `entries` are the entries of the
    file in the manifest.
    """

    source: Path
    name: str
    entries: tuple[ShardEntry, ...]

    @property
    def num_bytes(self) -> int:
        return self.entries[0].file_bytes


def plan_files(directory: Path, *, manifest: Manifest) -> tuple[list[StagedFile], list[int]]:
    """Returns the list of files of a dataset, and a list with the index of the file of each shard. Pure.

    `directory` is the directory of the dataset.
    """
    numbers: dict[str, int] = {}
    entries: list[list[ShardEntry]] = []
    file_of = []
    for entry in manifest.shards:
        number = numbers.setdefault(entry.file, len(numbers))
        if number == len(entries):
            entries.append([])
        entries[number].append(entry)
        file_of.append(number)
    files = [
        StagedFile(
            source=directory / name,
            name=name if "/" not in name else f"{number:07d}-{Path(name).name}",
            entries=tuple(entries[number]),
        )
        for name, number in numbers.items()
    ]
    return files, file_of


def staged_manifest(manifest: Manifest, *, files: Sequence[StagedFile], file_of: Sequence[int]) -> Manifest:
    """Returns a copy of the manifest that lists the copies instead of the original files. Pure.

    `files` are the files of the dataset, and `file_of` contains for each shard the index of its file: the results of
    `plan_files`.
    """
    shards = tuple(
        entry.model_copy(update={"file": files[number].name})
        for entry, number in zip(manifest.shards, file_of, strict=True)
    )
    return manifest.model_copy(update={"shards": shards})


@final
class StageFolder:
    """The folder on node-local storage with the copies of one dataset's files. All ranks of a node open it.

    Each process that uses the folder holds a shared lock on it.
    """

    def __init__(self, path: Path, *, users: int) -> None:
        """Do not call this; use `open`. `users` is the file descriptor that holds the shared lock."""
        self.path = path
        self._users: int | None = users
        self._stager: int | None = None

    @classmethod
    def open(cls, root: Path, *, source: Path, manifest: Manifest, staged: Manifest) -> StageFolder:
        """Opens the folder below `root` for the copies of a dataset, creating it if necessary. Raises DataError.

        `source` is the directory of the dataset, and `manifest` its manifest. `staged` is the manifest with the file
        names of the copies, a result of `staged_manifest`.
        """
        identity = f"{manifest.fingerprint} {source.resolve()}"
        path = root / f"{PREFIX}{os.getuid()}-{hash_of(identity.encode())}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                path.mkdir(mode=0o700, exist_ok=True)
                users = _lock(path / _USERS_LOCK, shared=True)
                if users is not None:
                    break
            folder = cls(path, users=users)
            if folder.become_stager():
                # The stager also writes the manifest; the other processes do not wait for it.
                for leftover in path.glob(f"{COPYING}*"):
                    leftover.unlink(missing_ok=True)
                if staged.windows is not None:
                    partial = path / f"{COPYING}windows"
                    shutil.copyfile(source / staged.windows.file, partial)
                    partial.rename(path / staged.windows.file)
                write_manifest(staged, directory=path)
        except OSError as error:
            raise DataError(
                f"shards cannot be staged below {root}: {error}. Choose a directory on the node's own storage"
            ) from error
        return folder

    def become_stager(self) -> bool:
        """Tries to make this process the stager: the only process that copies files into the folder.

        Returns True if this process is now the stager, or was it before.
        """
        if self._stager is None:
            with contextlib.suppress(FileNotFoundError):
                self._stager = _lock(self.path / _STAGER_LOCK, shared=False, wait=False)
        return self._stager is not None

    def names(self) -> set[str]:
        """Returns the names of the files in the folder that were copied completely."""
        with contextlib.suppress(FileNotFoundError):
            return {name for name in os.listdir(self.path) if not name.startswith(".")}
        return set()

    def num_bytes(self) -> int:
        """Returns the size of all files in bytes, including files that are being copied or removed."""
        total = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total

    def close(self) -> None:
        """Ends the use of the folder by this process. Removes the folder if no other process uses it.

        May be called more than once.
        """
        if self._users is None:
            return
        if self._stager is not None:
            os.close(self._stager)
        os.close(self._users)
        self._users = self._stager = None
        _remove_unused(self.path)


def clean_up(root: Path) -> list[Path]:
    """Removes this user's folders of copies below `root` that no running process uses. Returns their paths."""
    found = sorted(root.glob(f"{PREFIX}{os.getuid()}-*")) if root.is_dir() else []
    return [path for path in found if _remove_unused(path)]


def _remove_unused(path: Path) -> bool:
    try:
        lock = _lock(path / _USERS_LOCK, shared=False, wait=False)
        if lock is None:
            return False
        try:
            # The lock file is deleted last: a process that waits for it detects this and makes a new folder.
            for name in os.listdir(path):
                if name != _USERS_LOCK:
                    (path / name).unlink(missing_ok=True)
            (path / _USERS_LOCK).unlink()
            path.rmdir()
        finally:
            os.close(lock)
    except OSError:
        # Another process is removing it, or has just joined it.
        return not path.exists()
    return True


def hold(path: Path) -> int | None:
    """Locks a copied file so that it is not removed. Returns the file descriptor that has the lock.

    Returns None if the file is missing or is being removed.
    """
    with contextlib.suppress(OSError):
        return _lock(path, shared=True, wait=False, create=False)
    return None


def remove_unread(path: Path) -> bool:
    """Removes a copied file, unless a process has locked it with `hold`. Returns True if the file was removed."""
    with contextlib.suppress(OSError):
        lock = _lock(path, shared=False, wait=False, create=False)
        if lock is not None:
            path.unlink(missing_ok=True)
            os.close(lock)
            return True
    return False


def _lock(path: Path, *, shared: bool, wait: bool = True, create: bool = True) -> int | None:
    """Returns a file descriptor with a lock on `path`.

    Returns None if another process has the lock, or if the file was removed or replaced meanwhile.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        if create and wait:
            return None  # the folder was removed between two calls: the caller makes it again
        raise
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    os.close(descriptor)
    return None


# Copies one shard's file, and compares it with the manifest's hashes while copying.


_PIECE_BYTES = 1 << 20


class CopyStopped(Exception):
    """Raised if the copying of a file was stopped from outside before the copy was complete."""


def copy_dataset_file(
    source: Path, target: Path, *, manifest: Manifest, entries: Sequence[ShardEntry], stop: threading.Event
) -> None:
    """Copies a file of a dataset to `target`, with its modification time. Removes `target` after an error.

    `entries` are the entries of the file in the manifest. While the file is copied, contiguous fields are compared with
    their hashes block by block, and the HDF5 headers with their hash. Then the copy is read back and compared with the
    bytes that were read from the source. Chunked data, and files in which a field has no hashes, are checked only by
    reading the copy back. Raises DataError if the content differs, OSError after an error of a filesystem, and
    CopyStopped if `stop` was set.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        entry = entries[0]
        if status.st_size != entry.file_bytes:
            raise DataError(
                f"{source} has {status.st_size} bytes, the manifest says {entry.file_bytes}: restore the file, or "
                f"{'index' if entry.modified_ns is not None else 'pack'} again"
            )
        if entry.modified_ns is not None and status.st_mtime_ns != entry.modified_ns:
            raise DataError(f"{source} was changed since it was indexed: index it again")
        written = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A full disk raises an error here, not in the middle of the copy.
            os.posix_fallocate(written, 0, status.st_size)
            _copy(descriptor, written, source=source, manifest=manifest, entries=entries, stop=stop)
            # Access time 0: the copy was not read since it was made, see `Stager`.
            os.utime(written, ns=(0, status.st_mtime_ns))
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(written)
    finally:
        os.close(descriptor)


def _copy(
    descriptor: int, written: int, *, source: Path, manifest: Manifest, entries: Sequence[ShardEntry],
    stop: threading.Event,
) -> None:  # fmt: skip
    blocks = _hashed_blocks(manifest, entries=entries)
    structure_hash = entries[0].structure_hash if len(entries) == 1 and blocks is not None else None
    structure, whole = xxhash.xxh3_64(), xxhash.xxh3_64()
    for start, stop_byte, expected in _pieces(blocks or [], file_bytes=entries[0].file_bytes):
        if stop.is_set():
            raise CopyStopped
        data = read_bytes(descriptor, stop_byte - start, offset=start)
        if len(data) < stop_byte - start:
            raise DataError(
                f"{source} became shorter while it was copied: it ends at byte {start + len(data)}"
            )
        if expected is None:
            structure.update(data)
        elif hash_of(data) != expected:
            raise DataError(f"{source} is damaged: bytes {start} to {stop_byte - 1} differ from their hash")
        whole.update(data)
        write_fully(written, memoryview(data), offset=start)
    if structure_hash is not None and structure.hexdigest() != structure_hash:
        raise DataError(f"{source} is damaged: its HDF5 headers differ from what was written")
    again = xxhash.xxh3_64()
    for start in range(0, entries[0].file_bytes, _PIECE_BYTES):
        if stop.is_set():
            raise CopyStopped
        again.update(read_bytes(written, min(_PIECE_BYTES, entries[0].file_bytes - start), offset=start))
    if again.digest() != whole.digest():
        raise DataError(
            f"the copy of {source} differs from the file when it is read back: check the storage of the node"
        )


Piece = tuple[int, int, str | None]
"""A byte range of a file and its expected hash: (start, stop, hash). The hash is None if it is unknown."""


def _hashed_blocks(manifest: Manifest, *, entries: Sequence[ShardEntry]) -> list[Piece] | None:
    """Returns the byte ranges of a file that have a hash, with the hashes, sorted by offset.

    `entries` are the entries of the file in the manifest. Returns None if the bytes of a field cannot be compared with
    hashes, or if byte ranges overlap.
    """
    blocks: list[Piece] = []
    for entry in entries:
        for name, stored in entry.fields.items():
            if stored.offset is None or not stored.hashes or stored.big_endian or stored.first_row:
                return None
            assert name in manifest.fields
            ranges = block_ranges(stored.num_bytes, block_bytes=manifest.block_bytes)
            for (start, stop), expected in zip(ranges, stored.hashes, strict=True):
                blocks.append((stored.offset + start, stored.offset + stop, expected))
    blocks.sort()
    if any(first[1] > second[0] for first, second in itertools.pairwise(blocks)):
        return None
    return blocks


def _pieces(blocks: Sequence[Piece], *, file_bytes: int) -> Iterator[Piece]:
    """Yields byte ranges that make up a whole file, in order: the given `blocks`, and the bytes between them.

    `blocks` are the byte ranges that have a hash. The bytes between them are divided into pieces of at most 1 MiB.
    """
    position = 0
    for start, stop, expected in [*blocks, (file_bytes, file_bytes, None)]:
        while position < start:
            end = min(position + _PIECE_BYTES, start)
            yield position, end, None
            position = end
        if stop > start:
            yield start, stop, expected
            position = stop


# Background thread that copies files of a dataset to node-local storage, within a bound of bytes.


_POLL_INTERVAL_S = 0.2
_FULL_DISK_PAUSE_S = 10.0


@final
class Stager:
    """Copies a dataset's files to node-local storage in a background thread.

    Files are copied in order, beginning at the file that was requested last. An error never ends the run. Copies are
    kept until disk space is needed. Then the copies that were not read for the longest time are removed. A copy is
    removed only if it was read at least once, was not read within the last `idle_s` seconds, and is not being read by
    any process. The attribute `problems` maps the names of files that were not copied to the reasons.
    """

    def __init__(
        self,
        folder: StageFolder,
        *,
        files: Sequence[StagedFile],
        manifest: Manifest,
        max_bytes: int,
        idle_s: float,
    ) -> None:
        """Starts the thread that copies. This process must be the only one that copies files into `folder`.

        `max_bytes` is the maximum size of all copies together, in bytes.
        """
        self.problems: dict[str, str] = {}
        self.wanted: int | None = None
        """Index of the file without a copy that this process has requested last. Set by the reading threads."""
        self._next = 0
        self._folder = folder
        self._files = files
        self._manifest = manifest
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-stager", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                pause_s = self._step()
            except CopyStopped:
                return
            except OSError as error:  # of the folder, which may have been removed
                self.problems[str(self._folder.path)] = str(error)
                pause_s = _FULL_DISK_PAUSE_S
            if pause_s is None:
                return
            self._stop.wait(pause_s)

    def _step(self) -> float | None:
        """Copies files for a short time. Returns the number of seconds to wait before this method is called again.

        Returns None if no files remain to be copied.
        """
        there = self._folder.names()
        missing = [
            number
            for number, file in enumerate(self._files)
            if file.name not in there and file.name not in self.problems
        ]
        if not missing:
            return None
        # Continue at the file that is read now; else in order, so that a file that was just removed is not next.
        if self.wanted is not None:
            self._next, self.wanted = self.wanted, None
        first, began = self._next, time.monotonic()
        free_bytes = self._max_bytes - self._folder.num_bytes()
        for number in sorted(missing, key=lambda number: (number - first) % len(self._files)):
            file = self._files[number]
            if file.num_bytes > self._max_bytes:
                self.problems[file.name] = f"{file.num_bytes} bytes, more than the bound of {self._max_bytes}"
                continue
            if free_bytes < file.num_bytes:
                free_bytes = self._make_room(file.num_bytes)
            if free_bytes < file.num_bytes:
                return _POLL_INTERVAL_S
            self._next = (number + 1) % len(self._files)
            if self._copy(file):
                free_bytes -= file.num_bytes
            if self.wanted is not None or time.monotonic() - began > _POLL_INTERVAL_S:
                break
        return 0.0

    def _copy(self, file: StagedFile) -> bool:
        partial = self._folder.path / f"{COPYING}{file.name}"
        try:
            copy_dataset_file(
                file.source, partial, manifest=self._manifest, entries=file.entries, stop=self._stop
            )
            partial.rename(self._folder.path / file.name)
        except DataError as error:
            self.problems[file.name] = str(error)
            return False
        except OSError as error:
            self.problems[file.name] = f"{file.source} cannot be staged: {error}"
            return False
        return True

    def _make_room(self, num_bytes: int) -> int:
        """Removes copies that have not been read lately, until there is room for `num_bytes` more bytes, if possible.

        Returns the number of bytes that can then be added without exceeding the maximum size of all copies.
        """
        path = self._folder.path
        for leaving in path.glob(f"{LEAVING}*"):
            remove_unread(leaving)  # removed once all its readers have released it
        free_bytes = self._max_bytes - self._folder.num_bytes()
        leaving_bytes = sum(leaving.stat().st_size for leaving in path.glob(f"{LEAVING}*"))
        idle = []
        now = time.time()
        for file in self._files:
            try:
                used = os.stat(path / file.name).st_atime
            except FileNotFoundError:
                continue
            if 0 < used < now - self._idle_s:
                idle.append((used, file))
        for _, file in sorted(idle, key=lambda pair: pair[0]):
            if free_bytes + leaving_bytes >= num_bytes:
                break
            # After the rename no process opens it; processes that have it open can still read it.
            gone = path / f"{LEAVING}{file.name}"
            (path / file.name).rename(gone)
            if remove_unread(gone):
                free_bytes += file.num_bytes
            else:
                leaving_bytes += file.num_bytes
        return free_bytes

    def close(self) -> None:
        """Ends the thread, even while it copies a file. May be called more than once."""
        self._stop.set()
        self._thread.join()
