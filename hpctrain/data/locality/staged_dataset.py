"""Reads a dataset from copies of its files on node-local storage. Files that have no copy yet are read directly.

    dataset = StagedDataset.open(Dataset.open("/scratch/images"), directory="/local/tmp", max_bytes=200 << 30)

One process per node copies files in the background, compares them with the hashes in the manifest, and limits the size
of all copies to `max_bytes`. All ranks of the node read the copies. The ranks do not communicate: they coordinate
through files and locks in the folder of the copies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest import FieldSpec, Manifest, ShardEntry
from hpctrain.data.locality.node_copies import (
    StageFolder,
    Stager,
    clean_up,
    hold,
    plan_files,
    staged_manifest,
)
from hpctrain.data.reading.dataset import Dataset, Verify
from hpctrain.errors import DataError, RecipeError

_POLL_INTERVAL_S = 0.25
# Listing the folder may take at most this share of the time.
_POLL_SHARE = 0.02
_IDLE_S = 10.0
# Maximum number of copies that a process protects from removal, by a locked descriptor each; then it releases all.
_MAX_HELD = 256


def open_verified_when_read(folder: Path) -> Dataset:
    """Opens `folder`, in which copies of shards are made, as a dataset. Checks no file now.

    Most copies do not exist yet when the folder is opened. Each copy is checked when it is first read.
    """
    return Dataset.open(folder, verify=Verify.OFF)


class _Copies:
    """The copies of a dataset's files on node-local storage, opened as a dataset.

    `held` maps the index of a file to a file descriptor with a lock that prevents the removal of its copy. The
    descriptors are closed, and the locks released, when this object is deleted.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.held: dict[int, int] = {}

    def __del__(self) -> None:
        for descriptor in self.held.values():
            os.close(descriptor)


@final
class StagedDataset:
    """A dataset that reads samples from copies on node-local storage where copies exist. Create it with `open`.

    `gather` is thread-safe. Each rank opens an object of its own, passes it to a loader, and closes it at the end. No
    method is collective.
    """

    is_thread_safe: Final = True

    def __init__(
        self, original: Dataset, *, folder: StageFolder, max_bytes: int, idle_s: float,
        reopen: Callable[[Path], Dataset],
    ) -> None:  # fmt: skip
        """Do not call this; use `open`."""
        self.original = original
        self.staged_samples = 0
        """Number of samples that were read so far from copies on node-local storage."""
        self.read_samples = 0
        """Number of samples that were read so far, from copies or from the original files."""
        manifest = original.manifest
        files, file_of = plan_files(original.directory, manifest=manifest)
        self._files = files
        self._numbers = {file.name: number for number, file in enumerate(files)}
        self._file_of = np.array(file_of, dtype=np.int64)
        self._starts = np.concatenate(
            [[0], np.cumsum([shard.samples for shard in manifest.shards], dtype=np.int64)]
        ).astype(np.int64)
        self._folder = folder
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._reopen = reopen
        # If all files fit, copies are never removed to make room, and need no locks.
        self._all_fit = sum(file.num_bytes for file in files) <= max_bytes
        self._lock = threading.Lock()
        self._copies: _Copies | None = None
        self._staged = np.zeros(len(files), dtype=np.bool_)
        self._used = np.zeros(len(files), dtype=np.bool_)
        self._next_poll_s = 0.0
        self._stager: Stager | None = None
        self._closed = False
        self._take_over()

    @classmethod
    def open(
        cls,
        original: Dataset,
        *,
        directory: Path | str,
        max_bytes: int,
        idle_s: float = _IDLE_S,
        reopen: Callable[[Path], Dataset] = open_verified_when_read,
    ) -> StagedDataset:
        """Starts to copy a dataset to a folder below `directory`, on storage of this node. Not collective.

        Also removes from `directory` the copies that killed runs have left.

        Args:
            original: The opened dataset.
            directory: Directory on node-local storage.
            max_bytes: Maximum size of all copies together, in bytes.
            idle_s: Time in seconds for which a copy must not have been read before it may be removed to make room.
            reopen: Function that opens the folder of the copies as a dataset. It should use the same options as those
                of `original`.

        Returns:
            The dataset to pass to the loader. Call its `close` at the end.

        Raises:
            DataError: If the directory cannot be used.
            RecipeError: If `max_bytes` is below 1.
        """
        if max_bytes < 1:
            raise RecipeError(f"max_bytes for staging is {max_bytes} bytes: at least 1 byte is needed")
        root = Path(directory)
        try:
            clean_up(root)
        except OSError as error:
            raise DataError(f"shards cannot be staged below {root}: {error}") from error
        files, file_of = plan_files(original.directory, manifest=original.manifest)
        folder = StageFolder.open(
            root,
            source=original.directory,
            manifest=original.manifest,
            staged=staged_manifest(original.manifest, files=files, file_of=file_of),
        )
        return cls(original, folder=folder, max_bytes=max_bytes, idle_s=idle_s, reopen=reopen)

    def _take_over(self) -> None:
        if self._stager is None and self._folder.become_stager():
            self._stager = Stager(
                self._folder, files=self._files, manifest=self.original.manifest, max_bytes=self._max_bytes,
                idle_s=self._idle_s,
            )  # fmt: skip

    @property
    def num_samples(self) -> int:
        return self.original.num_samples

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return self.original.fields

    @property
    def manifest(self) -> Manifest:
        return self.original.manifest

    @property
    def attributes(self) -> Mapping[str, Any]:
        return self.original.attributes

    @property
    def directory(self) -> Path:
        """Directory of the original dataset."""
        return self.original.directory

    @property
    def checker(self) -> Any:
        """Checker of the original dataset, or None. A loader uses the checker to leave out damaged samples."""
        return self.original.checker

    @property
    def folder(self) -> Path:
        """Path of the folder on node-local storage that contains the copies."""
        return self._folder.path

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why files were not copied, by file name. Empty unless this process copies the files."""
        return dict(self._stager.problems) if self._stager is not None else {}

    @property
    def staged_share(self) -> float:
        """Fraction of the dataset's files that have a copy on node-local storage.

        The number is as of the last time that this process looked into the folder of the copies.
        """
        return float(self._staged.mean())

    def place_of(self, entry: ShardEntry) -> Path:
        """Returns the path from which a shard is read now: that of the copy if there is one, else that of the original.

        Args:
            entry: The shard's entry in the manifest.

        Raises:
            DataError: If `entry` is not a shard of this dataset.
        """
        for file in self._files:
            if file.entries[0].file == entry.file:
                copy = self._folder.path / file.name
                return copy if copy.exists() else file.source
        raise DataError(f"{entry.file} is not a shard of {self.directory}")

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Reads samples by index, as `Dataset.gather` does, from the copies that exist.

        If a copy does not exist or cannot be read, the original file is read.

        Args:
            indices: Indices of the samples in the dataset: int64, shape (n,).
            out: Arrays to fill instead of new ones, by field name, for some or all fields.

        Returns:
            For each field an array of shape (n, *sample_shape).

        Raises:
            DataError: As in `Dataset.gather`.
        """
        indices = np.asarray(indices, dtype=np.int64)
        try:
            return self._gather(indices, out=out)
        except OSError:  # the folder's filesystem
            return self.original.gather(indices, out=out)

    def _gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None
    ) -> dict[str, NDArray[Any]]:
        self._poll()
        if not len(indices) or int(indices.min()) < 0 or int(indices.max()) >= self.num_samples:
            return self.original.gather(indices, out=out)
        files = self._file_of[np.searchsorted(self._starts, indices, side="right") - 1]
        try:
            copies, usable = self._take(np.unique(files))
        except DataError:  # the folder was deleted or emptied
            return self.original.gather(indices, out=out)
        near = usable[files]
        self.read_samples += len(indices)
        if copies is None or not near.any():
            return self.original.gather(indices, out=out)
        try:
            if near.all():
                arrays = copies.dataset.gather(indices, out=out)
                self.staged_samples += len(indices)
                return arrays
            found = copies.dataset.gather(indices[near])
        except (DataError, OSError):
            with self._lock:
                self._copies = None
            return self.original.gather(indices, out=out)
        far = self.original.gather(indices[~near])
        arrays = {}
        for name, array in found.items():
            whole = out[name] if out is not None and name in out else None
            if whole is None:
                whole = np.empty((len(indices), *array.shape[1:]), array.dtype)
            whole[near] = array
            whole[~near] = far[name]
            arrays[name] = whole
        self.staged_samples += int(near.sum())
        return arrays

    def _take(self, files: NDArray[np.int64]) -> tuple[_Copies | None, NDArray[np.bool_]]:
        """Prepares the reading of a batch from copies. Returns the opened copies, and a mask of the usable files.

        The mask is True for each file whose copy can be read: bool, shape (number of files of the dataset,). The copies
        are None if no file of this batch has a copy. `files` contains the indices of the files that the batch needs:
        int64, shape (n,).
        """
        with self._lock:
            usable = self._staged.copy()
            wanted = files[~usable[files]]
            if len(wanted) and self._stager is not None:
                self._stager.wanted = int(wanted[-1])
            files = files[usable[files]]
            if not len(files) or self._closed:
                return None, np.zeros_like(usable)
            if self._copies is None:
                self._copies = _Copies(self._reopen(self._folder.path))
            if not self._all_fit:
                if len(self._copies.held) + len(files) > _MAX_HELD:
                    self._copies = _Copies(self._reopen(self._folder.path))
                self._used[files] = True
                for number in files.tolist():
                    if number in self._copies.held:
                        continue
                    descriptor = hold(self._folder.path / self._files[number].name)
                    if descriptor is None:
                        usable[number] = False
                    else:
                        self._copies.held[number] = descriptor
            return self._copies, usable

    def _poll(self) -> None:
        """Looks into the folder of the copies for new copies and for copies that are being removed.

        Returns at once if the last look was less than a minimum time ago.
        """
        began = time.monotonic()
        if began < self._next_poll_s or self._closed or not self._lock.acquire(blocking=False):
            return
        try:
            staged = np.zeros_like(self._staged)
            for name in self._folder.names():
                number = self._numbers.get(name)
                if number is not None:
                    staged[number] = True
            self._staged = staged
            if self._copies is not None and any(not staged[number] for number in self._copies.held):
                # The stager needs disk space: this process closes its copies and reopens them as needed.
                self._copies = None
            if not self._all_fit:
                now = time.time_ns()
                for number in np.flatnonzero(self._used & staged).tolist():
                    path = self._folder.path / self._files[number].name
                    try:
                        os.utime(path, ns=(now, path.stat().st_mtime_ns))
                    except OSError:
                        continue
                self._used[:] = False
            if not self._closed:
                self._take_over()
        finally:
            took_s = time.monotonic() - began
            self._next_poll_s = time.monotonic() + max(_POLL_INTERVAL_S, took_s / _POLL_SHARE)
            self._lock.release()

    def wait_until_staged(self, *, timeout_s: float) -> float:
        """Waits until every file has a copy.

        Args:
            timeout_s: Maximum time to wait, in seconds.

        Returns:
            The fraction of the files that have a copy when the wait ends.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._next_poll_s = 0.0
            self._poll()
            if bool(self._staged.all()):
                break
            time.sleep(0.01)
        return self.staged_share

    def close(self) -> None:
        """Stops copying, and ends the use of the folder by this process. The last process removes the folder.

        May be called more than once.
        """
        with self._lock:
            self._closed = True  # first: prevents this process from taking over the copying
            self._copies = None
        if self._stager is not None:
            self._stager.close()
        self._folder.close()

    def __enter__(self) -> StagedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
