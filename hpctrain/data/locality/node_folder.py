"""The folder on node-local storage in which the ranks of a node share copies of shards.

Each process that uses it holds a lock on it (flock), which the kernel releases when the process ends for any reason.
A folder without a lock is a leftover, and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from hpctrain.data.format.manifest import Manifest, ShardEntry, write_manifest
from hpctrain.errors import DataError
from hpctrain.storage import hash_of

PREFIX = "hpctrain-stage-"
COPYING = ".copying-"
LEAVING = ".leaving-"
_USERS_LOCK = ".users.lock"
_STAGER_LOCK = ".stager.lock"


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """One file of the dataset: its path, its name in the folder, and the entries of the manifest that are in it."""

    source: Path
    name: str
    entries: tuple[ShardEntry, ...]

    @property
    def num_bytes(self) -> int:
        return self.entries[0].file_bytes


def plan_files(directory: Path, *, manifest: Manifest) -> tuple[list[StagedFile], list[int]]:
    """Returns the files of a dataset, each once, and for each shard the index of its file. Pure."""
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
    """Returns the manifest with the names of the files in the folder. Pure."""
    shards = tuple(
        entry.model_copy(update={"file": files[number].name})
        for entry, number in zip(manifest.shards, file_of, strict=True)
    )
    return manifest.model_copy(update={"shards": shards})


@final
class StageFolder:
    """The folder of one dataset, locked by this process while in use. All ranks of a node open the same folder."""

    def __init__(self, path: Path, *, users: int) -> None:
        """Use `open`. users: descriptor that holds the shared lock."""
        self.path = path
        self._users: int | None = users
        self._stager: int | None = None

    @classmethod
    def open(cls, root: Path, *, source: Path, manifest: Manifest, staged: Manifest) -> StageFolder:
        """Makes or joins the folder of the dataset below `root`. Raises DataError if that is not possible.

        source: directory of the dataset. staged: the manifest with the names of the copies, see `staged_manifest`.
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
        """Tries to make this process the stager, the only one that copies files here. Returns True if it is."""
        if self._stager is None:
            with contextlib.suppress(FileNotFoundError):
                self._stager = _lock(self.path / _STAGER_LOCK, shared=False, wait=False)
        return self._stager is not None

    def names(self) -> set[str]:
        """Returns the names of the complete files."""
        with contextlib.suppress(FileNotFoundError):
            return {name for name in os.listdir(self.path) if not name.startswith(".")}
        return set()

    def num_bytes(self) -> int:
        """Returns the size of all files in bytes, including those that are being copied or removed."""
        total = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total

    def close(self) -> None:
        """Leaves the folder; the last process removes it. May be called more than once."""
        if self._users is None:
            return
        if self._stager is not None:
            os.close(self._stager)
        os.close(self._users)
        self._users = self._stager = None
        _remove_unused(self.path)


def clean_up(root: Path) -> list[Path]:
    """Removes this user's folders below `root` that no running process uses. Returns their paths."""
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
    """Returns a descriptor with a lock that prevents removal of a staged file; None if it is missing or removed."""
    with contextlib.suppress(OSError):
        return _lock(path, shared=True, wait=False, create=False)
    return None


def remove_unread(path: Path) -> bool:
    """Removes a staged file unless a process holds it. Returns True if it was removed."""
    with contextlib.suppress(OSError):
        lock = _lock(path, shared=False, wait=False, create=False)
        if lock is not None:
            path.unlink(missing_ok=True)
            os.close(lock)
            return True
    return False


def _lock(path: Path, *, shared: bool, wait: bool = True, create: bool = True) -> int | None:
    """Returns a descriptor with a lock on `path`; None if another process has it, or the file was replaced."""
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
