"""Reads a dataset from copies on the node's own storage, as soon as they are there; else from its own place.

    dataset = StagedDataset.open(Dataset.open("/scratch/images"), directory="/local/tmp", max_bytes=200 << 30)

One process a node copies files in the background, compares them with the manifest's hashes, and keeps them
within `max_bytes`. All ranks of the node read the copies. Nothing communicates: the ranks meet in the folder.
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
from hpctrain.data.locality.node_folder import StageFolder, clean_up, hold, plan_files, staged_manifest
from hpctrain.data.locality.stage_copier import Stager
from hpctrain.data.reading.dataset import Dataset, Verify
from hpctrain.errors import DataError, RecipeError

_LOOK_EVERY_S = 0.25
# Looking for new files may take at most this share of the time.
_LOOK_SHARE = 0.02
_IDLE_S = 10.0
# Files that a process keeps from going, each by a descriptor; then it lets go of all, and holds what it reads next.
_MAX_HELD = 256


def open_verified_when_read(folder: Path) -> Dataset:
    """The copies as a dataset: each is looked at when it is first read, since most are not there yet."""
    return Dataset.open(folder, verify=Verify.NOTHING)


class _Copies:
    """The copies that are being read. Files that may go have a lock, dropped with the last reader."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.held: dict[int, int] = {}

    def __del__(self) -> None:
        for descriptor in self.held.values():
            os.close(descriptor)


@final
class StagedDataset:
    """A `Samples` for the loader: the dataset, read from staged copies where there are some.

    `gather` is safe in threads. Each rank opens its own and closes it at the end.
    """

    is_thread_safe: Final = True

    def __init__(
        self, original: Dataset, *, folder: StageFolder, max_bytes: int, idle_s: float,
        reopen: Callable[[Path], Dataset],
    ) -> None:  # fmt: skip
        """Use `open`."""
        self.original = original
        self.staged_samples = 0
        """Samples read from copies so far."""
        self.read_samples = 0
        """Samples read so far."""
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
        # Copies never have to make room for others where all find room.
        self._all_fit = sum(file.num_bytes for file in files) <= max_bytes
        self._lock = threading.Lock()
        self._copies: _Copies | None = None
        self._staged = np.zeros(len(files), dtype=np.bool_)
        self._used = np.zeros(len(files), dtype=np.bool_)
        self._look_at = 0.0
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
        """Begin to stage `original` below `directory`, on storage of this node. Not collective.

        max_bytes: what the copies may take. idle_s: a copy that was read must not have been for so long before
        it makes room for another. reopen: opens the folder with the copies as a dataset, with the options that
        the original has. Leftovers of runs that were killed are removed from `directory`.
        Raises DataError if the directory cannot be used, RecipeError for a bound that is none.
        """
        if max_bytes < 1:
            raise RecipeError(f"staging within {max_bytes} bytes: at least 1 byte is needed")
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
        """Where the dataset has its own place."""
        return self.original.directory

    @property
    def checker(self) -> Any:
        """The original's: what is left out of batches where data is damaged."""
        return getattr(self.original, "checker", None)

    @property
    def folder(self) -> Path:
        """Where the copies are."""
        return self._folder.path

    @property
    def is_stager(self) -> bool:
        """Whether this process copies the files for its node."""
        return self._stager is not None

    @property
    def problems(self) -> dict[str, str]:
        """Why files were not staged, as far as this process knows: file name -> reason."""
        return dict(self._stager.problems) if self._stager is not None else {}

    @property
    def staged_share(self) -> float:
        """Share of the files that have copies, as last looked."""
        return float(self._staged.mean())

    def place_of(self, entry: ShardEntry) -> Path:
        """The file that a shard is read from now: its copy, if there is one, or the original."""
        for file in self._files:
            if file.entries[0].file == entry.file:
                copy = self._folder.path / file.name
                return copy if copy.exists() else file.source
        raise DataError(f"{entry.file} is no shard of {self.directory}")

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """As `Dataset.gather`. A copy that cannot be read is passed over for the original."""
        indices = np.asarray(indices, dtype=np.int64)
        try:
            return self._gather(indices, out=out)
        except OSError:  # the folder's filesystem
            return self.original.gather(indices, out=out)

    def _gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None
    ) -> dict[str, NDArray[Any]]:
        self._look()
        if not len(indices) or int(indices.min()) < 0 or int(indices.max()) >= self.num_samples:
            return self.original.gather(indices, out=out)
        files = self._file_of[np.searchsorted(self._starts, indices, side="right") - 1]
        try:
            copies, usable = self._take(np.unique(files))
        except DataError:  # the folder was cleared by somebody
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
        """The copies to read from, and which of all files can be read there."""
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

    def _look(self) -> None:
        """See now and then which copies have come, and which are to go."""
        began = time.monotonic()
        if began < self._look_at or self._closed or not self._lock.acquire(blocking=False):
            return
        try:
            staged = np.zeros_like(self._staged)
            for name in self._folder.names():
                number = self._numbers.get(name)
                if number is not None:
                    staged[number] = True
            self._staged = staged
            if self._copies is not None and any(not staged[number] for number in self._copies.held):
                # Somebody wants room: what this process has open is dropped, and opened again as needed.
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
            self._look_at = time.monotonic() + max(_LOOK_EVERY_S, took_s / _LOOK_SHARE)
            self._lock.release()

    def wait_until_staged(self, *, timeout_s: float) -> float:
        """Wait until every file that can be has a copy, or for `timeout_s`; the share of files that have one."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._look_at = 0.0
            self._look()
            if bool(self._staged.all()):
                break
            time.sleep(0.01)
        return self.staged_share

    def close(self) -> None:
        """End the copying, and leave the folder: the last process to leave removes it. May be called again."""
        with self._lock:
            self._closed = True  # first: nobody takes over the copying any more
            self._copies = None
        if self._stager is not None:
            self._stager.close()
        self._folder.close()

    def __enter__(self) -> StagedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
