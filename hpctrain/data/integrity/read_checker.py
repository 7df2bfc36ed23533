"""Compares data with the hashes in the manifest while the data is read for training.

    check_while_reading(dataset, mode="first-epoch")

`Dataset.gather` then calls the checker before it reads samples of a shard. The checker reads and hashes the blocks
that contain these samples. `gather` and the checker read the same pages of the page cache, even if the file is
memory-mapped.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest import Manifest
from hpctrain.data.format.shard_file import HEADERS_DIFFER, HeadersDamaged
from hpctrain.data.format.token_windows import read_windows
from hpctrain.data.integrity.hashed_blocks import (
    CACHE_BYTES,
    BlockFile,
    Damage,
    block_at,
    blocks_touched,
    is_hashed,
    samples_of,
)
from hpctrain.data.order.epoch_order import BatchPlan
from hpctrain.data.reading.dataset import Dataset
from hpctrain.errors import DataError

_MAX_OPEN = 256

_UNKNOWN, _SOUND, _DAMAGED = 0, 1, 2


class CheckMode(str, Enum):
    """When a block of data is hashed and compared with the manifest while a dataset is read.

    The manifest has one hash per block of consecutive bytes of a field.

    OFF: Never.
    FIRST_EPOCH: Once per process, at the first read of the block.
    ALWAYS: At every read of the block.
    """

    OFF = "off"
    FIRST_EPOCH = "first-epoch"  # each block once per process, at its first read
    ALWAYS = "always"  # at every read


class OnDamage(str, Enum):
    """What to do if samples of a batch are damaged: they lie in a block of data that differs from its hash.

    STOP: End the run.
    SKIP: Leave the damaged samples out of the batch, and count them.
    """

    STOP = "stop"  # the run ends
    SKIP = "skip"  # they are left out of their batch, and counted


class DamagedData(DataError):
    """Raised if data differs from its hash. The attribute `damage` states the shard, the field and the samples."""

    def __init__(self, damage: Damage, *, directory: Path) -> None:
        super().__init__(
            f"{directory} is damaged: {damage.describe()}. Restore the shard (hpctrain data verify lists all "
            'damage), or leave such samples out with data.on_damage = "skip"'
        )
        self.damage = damage


@final
class BlockChecker:
    """Compares blocks of data with their hashes before samples in the blocks are read. Thread-safe, also after fork.

    The manifest has one hash per block of consecutive bytes of a field. Strings and rows of variable length have no
    hashes, and are not checked. No method communicates between ranks. The attribute `damages` lists the damage found so
    far, each block once. `place_of` takes the index of a shard. It returns the path of the copy from which the shard is
    read, or None if the shard is read from `directory`. Raises DataError if a field of kind `array` has no hashes.
    """

    def __init__(
        self,
        directory: Path | str,
        manifest: Manifest,
        *,
        mode: CheckMode | str = CheckMode.FIRST_EPOCH,
        place_of: Callable[[int], Path | None] = lambda shard: None,
    ) -> None:
        self.directory = Path(directory)
        self.manifest = manifest
        self.mode = CheckMode(mode)
        self.damages: list[Damage] = []
        self._place_of = place_of
        # Cached chunks would not show what is on the disk now.
        self._cache_bytes = 0 if self.mode is CheckMode.ALWAYS else CACHE_BYTES
        # shape (num_shards + 1,): first sample of each shard, then the number of samples
        self._starts = np.concatenate([[0], np.cumsum([shard.samples for shard in manifest.shards])])
        # _states: (shard, field) -> _UNKNOWN, _SOUND or _DAMAGED per block, shape (num_blocks,)
        self._windows = read_windows(self.directory, manifest=manifest)
        self._states: dict[tuple[int, str], NDArray[np.uint8]] = {}
        self._whole: set[tuple[int, str]] = set()
        self._reasons: dict[tuple[int, str, int], str] = {}
        self._check_hashed()
        self._reset()

    def _check_hashed(self) -> None:
        for entry in self.manifest.shards:
            for name, stored in entry.fields.items():
                if stored.num_bytes and not stored.hashes and self.manifest.fields[name].kind == "array":
                    raise DataError(
                        f"field {name!r} of shard {entry.file} of {self.directory} has no hashes, so it cannot be "
                        'checked: index the files again with --hash, or set data.check = "off"'
                    )

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, BlockFile] = OrderedDict()
        self._pid = os.getpid()  # last: a thread that reads it may use all of the above

    def before_read(self, shard_index: int, field_name: str, rows: NDArray[np.int64]) -> None:
        """Compares the blocks of a field that contain the given samples of a shard with their hashes.

        In mode FIRST_EPOCH, blocks that were checked before are not read again. `rows` are the indices of the samples
        within the shard: int64, shape (n,). Raises DamagedData for the first damaged block, and DataError if the shard
        is missing or truncated.
        """
        if self.mode is CheckMode.OFF or not len(rows):
            return
        key = (shard_index, field_name)
        if key in self._whole or not is_hashed(self.manifest, shard=shard_index, field=field_name):
            return
        first, last = self._touched(shard_index, field_name, rows)
        bad = self._damaged(shard_index, field_name, blocks=_union(first, last))
        if len(bad):
            raise DamagedData(self._damage(shard_index, field_name, int(bad[0])), directory=self.directory)
        if self.mode is CheckMode.FIRST_EPOCH and bool((self._states[key] == _SOUND).all()):
            self._whole.add(key)

    def sound(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns an array that is True for each undamaged sample: bool, shape (n,).

        A sample is damaged if it lies in a block of data that differs from its hash. `indices` are the indices of the
        samples in the dataset: int64, shape (n,). Raises DataError if a shard is missing or truncated, and DamagedData
        if the HDF5 headers of a shard are damaged.
        """
        indices = np.asarray(indices, dtype=np.int64)
        sound = np.ones(len(indices), dtype=np.bool_)
        if self.mode is CheckMode.OFF:
            return sound
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        for shard in np.unique(shard_of):
            places = np.flatnonzero(shard_of == shard)
            rows = indices[places] - self._starts[shard]
            for field in self.manifest.fields:
                if not is_hashed(self.manifest, shard=int(shard), field=field):
                    continue
                first, last = self._touched(int(shard), field, rows)
                bad = self._damaged(int(shard), field, blocks=_union(first, last))
                sound[places] &= np.searchsorted(bad, first) == np.searchsorted(bad, last, side="right")
        return sound

    def _windows_of(self, shard: int) -> NDArray[np.int64] | None:
        if self._windows is None:
            return None
        return self._windows[self._starts[shard] : self._starts[shard + 1]]

    def _touched(
        self, shard: int, field: str, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return blocks_touched(self.manifest, field=field, rows=rows, windows=self._windows_of(shard))

    def _damaged(self, shard: int, field: str, *, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns those of the given blocks of a field that differ from their hashes, ascending.

        `blocks` are the indices of the blocks. In mode ALWAYS, all of them are read and hashed, in mode FIRST_EPOCH
        only those that were not checked before.
        """
        key = (shard, field)
        states = self._states.get(key)
        if states is None:
            states = np.zeros(len(self.manifest.shards[shard].fields[field].hashes), dtype=np.uint8)
            states = self._states.setdefault(key, states)
        # A copy: other threads may be looking at the same blocks.
        found = states[blocks]
        due = np.flatnonzero((found == _UNKNOWN) | (self.mode is CheckMode.ALWAYS))
        if len(due):
            file = self._file(shard)
            if self.mode is CheckMode.ALWAYS and field == next(iter(self.manifest.fields)):
                self._check_structure(shard, file)
            for place in due:
                block = block_at(self.manifest, shard=shard, field=field, index=int(blocks[place]))
                fault = file.fault_of(block)
                if fault is not None:
                    self._note(shard, field, block.index, fault)
                found[place] = _SOUND if fault is None else _DAMAGED
            states[blocks[due]] = found[due]
        return blocks[found == _DAMAGED]

    def _note(self, shard: int, field: str, index: int, reason: str) -> None:
        with self._lock:
            known = (shard, field, index) in self._reasons
            self._reasons[shard, field, index] = reason
            if not known:
                self.damages.append(self._damage(shard, field, index))

    def _damage(self, shard: int, field: str, index: int) -> Damage:
        block = block_at(self.manifest, shard=shard, field=field, index=index)
        first, last = samples_of(self.manifest, block, windows=self._windows_of(shard))
        return Damage(
            shard=self.manifest.shards[shard].file, field=field, first_sample=first, last_sample=last,
            reason=self._reasons[shard, field, index],
        )  # fmt: skip

    def _file(self, shard: int) -> BlockFile:
        if self._pid != os.getpid():
            self._reset()
        entry, copy = self.manifest.shards[shard], self._place_of(shard)
        path = self.directory / entry.file if copy is None else copy
        with self._lock:
            file = self._files.get(shard)
            if file is not None and file.path == path:
                self._files.move_to_end(shard)
                return file
        try:
            file = BlockFile(
                self.directory, manifest=self.manifest, entry=entry, path=copy, cache_bytes=self._cache_bytes
            )
        except HeadersDamaged:
            raise self._damaged_headers(shard) from None
        except OSError as error:
            raise DataError(f"shard {path} cannot be opened: {error}") from error
        self._check_structure(shard, file)
        with self._lock:
            self._files[shard] = file
            if len(self._files) > _MAX_OPEN:
                # Not closed, since another thread may be reading from it: closed with the last reference.
                self._files.popitem(last=False)
        return file

    def _check_structure(self, shard: int, file: BlockFile) -> None:
        # If the structure hash covers chunks, checking it would read the whole file: the blocks' hashes suffice.
        if not file.has_chunks and not file.structure_is_sound():
            raise self._damaged_headers(shard)

    def _damaged_headers(self, shard: int) -> DamagedData:
        entry = self.manifest.shards[shard]
        damage = Damage(
            shard=entry.file, field=None, first_sample=0, last_sample=entry.samples - 1, reason=HEADERS_DIFFER
        )
        return DamagedData(damage, directory=self.directory)


def _union(first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the integers that lie in at least one of the ranges first[i] to last[i], inclusive.

    The result is ascending, without repeats.
    """
    span = int((last - first).max())
    return np.unique(np.concatenate([np.minimum(first + step, last) for step in range(span + 1)]))


def make_checker(
    directory: Path | str,
    manifest: Manifest,
    *,
    mode: CheckMode | str,
    place_of: Callable[[int], Path | None] = lambda shard: None,
) -> BlockChecker | None:
    """Returns an object that checks samples for damage while they are read, or None for mode "off".

    Assign the object to `Dataset.checker`. `place_of` takes the index of a shard, and returns the path of the copy from
    which the shard is read, or None if the shard is read from `directory`.
    """
    if CheckMode(mode) is CheckMode.OFF:
        return None
    return BlockChecker(directory, manifest, mode=mode, place_of=place_of)


def check_while_reading(dataset: Dataset, *, mode: CheckMode | str) -> None:
    """Makes a dataset compare its data with the hashes in the manifest while samples are read. Not collective.

    If `dataset.locator` returns a copy of a shard, the copy is checked. The manifest has one hash per block of
    consecutive bytes of a field.

    Args:
        dataset: The opened dataset.
        mode: When to compare a block with its hash: "first-epoch" (at its first read in this process), "always", or
            "off".

    Raises:
        DataError: If a field of kind `array` has no hashes, as after indexing without reading the content.
    """
    # A weak reference: a cycle would keep the files open for some time after the dataset was deleted.
    checked = weakref.ref(dataset)

    def place_of(shard: int) -> Path | None:
        found = checked()
        return None if found is None or found.locator is None else found.locator.path(shard)

    dataset.checker = make_checker(dataset.directory, dataset.manifest, mode=mode, place_of=place_of)


# Reads a batch without the samples that lie in damaged blocks.


T = TypeVar("T")

# For a disk that fails intermittently: the read finds damage, but a second check finds none.
_TRIES = 3


def without_damaged(plan: BatchPlan, *, sound: NDArray[np.bool_], keep_length: bool) -> BatchPlan:
    """Returns a copy of `plan`, a rank's part of a batch, without the damaged samples.

    The order of the samples is kept, and the number of damaged samples is added to `num_skipped`. `sound` is True for
    each undamaged sample: bool, shape of `plan.indices`. With `keep_length`, undamaged samples are repeated as padding
    until there are as many rows as before. If all samples are damaged, no rows remain.
    """
    real = plan.indices[: plan.num_samples][sound[: plan.num_samples]]
    padding = plan.indices[plan.num_samples :][sound[plan.num_samples :]]
    if keep_length:
        pool = np.concatenate([real, padding])
        padding = np.resize(pool, len(plan.indices) - len(real)) if len(pool) else pool
    return replace(
        plan,
        indices=np.concatenate([real, padding]),
        num_samples=len(real),
        num_skipped=plan.num_skipped + plan.num_samples - len(real),
    )


def read_around_damage(
    plan: BatchPlan,
    *,
    read: Callable[[NDArray[np.int64]], T],
    sound: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
    keep_length: bool,
) -> tuple[BatchPlan, T]:
    """Reads the undamaged samples of a rank's part of a batch. Returns two values: a plan, and the data.

    The returned plan lists the samples that were read, and the data is the result of `read`. `plan` lists the samples
    to read. `read` takes sample indices and returns their data, or raises DamagedData. `sound` takes sample indices and
    returns an array that is True for each undamaged sample. With `keep_length`, undamaged samples are repeated as
    padding, so that the number of rows is kept.

    Raises DamagedData if the headers of a shard are damaged. Also raises DamagedData if three times `read` finds
    damage, but `sound` finds none. Raises DataError if a shard is missing or truncated.
    """
    tries = 0
    while True:
        try:
            return plan, read(plan.indices)
        except DamagedData as error:
            found = sound(plan.indices)
            tries += bool(found.all())
            if error.damage.field is None or tries == _TRIES:
                raise
            plan = without_damaged(plan, sound=found, keep_length=keep_length)
