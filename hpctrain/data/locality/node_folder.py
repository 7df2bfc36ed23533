"""The folder on node-local storage in which the ranks of a node share copies of shards.

Whoever uses it holds a lock on it (flock), which the kernel drops when the process ends, however it ends: a
folder that nobody has locked is a leftover, and is removed.
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

import xxhash

from hpctrain.data.format.manifest import Manifest, ShardEntry, write_manifest
from hpctrain.errors import DataError

PREFIX = "hpctrain-stage-"
COPYING = ".copying-"
LEAVING = ".leaving-"
_USERS_LOCK = ".users.lock"
_STAGER_LOCK = ".stager.lock"


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """One file of the dataset: its place, its name in the folder, and the entries that lie in it."""

    source: Path
    name: str
    entries: tuple[ShardEntry, ...]

    @property
    def num_bytes(self) -> int:
        return self.entries[0].file_bytes


def plan_files(directory: Path, *, manifest: Manifest) -> tuple[list[StagedFile], list[int]]:
    """The files of a dataset, each once, and for each shard which file it lies in. Pure."""
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
    """The manifest with the names that the files have in the folder. Pure."""
    shards = tuple(
        entry.model_copy(update={"file": files[number].name})
        for entry, number in zip(manifest.shards, file_of, strict=True)
    )
    return manifest.model_copy(update={"shards": shards})


@final
class StageFolder:
    """A folder for one dataset, locked as in use by this process. Every rank of a node opens the same one."""

    def __init__(self, path: Path, *, users: int) -> None:
        """Use `open`. users: descriptor that holds the shared lock."""
        self.path = path
        self._users: int | None = users
        self._stager: int | None = None

    @classmethod
    def open(cls, root: Path, *, source: Path, manifest: Manifest, staged: Manifest) -> StageFolder:
        """Make the folder below `root`, or join those who use it. Raises DataError if that is not possible."""
        identity = f"{manifest.fingerprint} {source.resolve()}"
        path = root / f"{PREFIX}{os.getuid()}-{xxhash.xxh3_64_hexdigest(identity.encode())}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                path.mkdir(mode=0o700, exist_ok=True)
                users = _lock(path / _USERS_LOCK, shared=True)
                if users is not None:
                    break
            folder = cls(path, users=users)
            if folder.become_stager():
                # The one that copies also writes the manifest: the others wait for neither.
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
        """Whether this process is the one that copies files here; there is one at a time."""
        if self._stager is None:
            with contextlib.suppress(FileNotFoundError):
                self._stager = _lock(self.path / _STAGER_LOCK, shared=False, wait=False)
        return self._stager is not None

    def names(self) -> set[str]:
        """Files that are there, complete."""
        with contextlib.suppress(FileNotFoundError):
            return {name for name in os.listdir(self.path) if not name.startswith(".")}
        return set()

    def num_bytes(self) -> int:
        """What the files take, also those that are being copied or leave."""
        total = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total

    def close(self) -> None:
        """Leave. The last one removes the folder. May be called again."""
        if self._users is None:
            return
        if self._stager is not None:
            os.close(self._stager)
        os.close(self._users)
        self._users = self._stager = None
        _remove_unused(self.path)


def clean_up(root: Path) -> list[Path]:
    """Remove the folders of this user below `root` that no living process uses; which they were."""
    found = sorted(root.glob(f"{PREFIX}{os.getuid()}-*")) if root.is_dir() else []
    return [path for path in found if _remove_unused(path)]


def _remove_unused(path: Path) -> bool:
    try:
        lock = _lock(path / _USERS_LOCK, shared=False, wait=False)
        if lock is None:
            return False
        try:
            # The lock's own file goes last: who waits for it sees that it is gone, and makes a new one.
            for name in os.listdir(path):
                if name != _USERS_LOCK:
                    (path / name).unlink(missing_ok=True)
            (path / _USERS_LOCK).unlink()
            path.rmdir()
        finally:
            os.close(lock)
    except OSError:
        # Somebody else removes it, or came in just now.
        return not path.exists()
    return True


def hold(path: Path) -> int | None:
    """A descriptor that keeps a staged file from being removed; None if it is not there, or about to go."""
    with contextlib.suppress(OSError):
        return _lock(path, shared=True, wait=False, create=False)
    return None


def remove_unread(path: Path) -> bool:
    """Remove a staged file unless a process holds it."""
    with contextlib.suppress(OSError):
        lock = _lock(path, shared=False, wait=False, create=False)
        if lock is not None:
            path.unlink(missing_ok=True)
            os.close(lock)
            return True
    return False


def _lock(path: Path, *, shared: bool, wait: bool = True, create: bool = True) -> int | None:
    """A descriptor with a lock on the file at `path`; None if it is taken, or the file was replaced meanwhile."""
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
