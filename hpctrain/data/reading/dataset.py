"""Reads samples by index into batches: contiguous fields directly at their file offsets, other fields chunk by chunk.

A shard is opened when a process first reads it. After a fork the child process opens its shards again, since an
inherited HDF5 handle returns wrong data (pytorch#11887).
"""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol, final

import numpy as np
import psutil
from numpy.typing import NDArray

from hpctrain.comm import World, agreed, broadcast_json, check_same
from hpctrain.data.format.manifest import FieldSpec, Manifest, read_manifest
from hpctrain.data.format.manifest_entries import MASK_SUFFIX, Packing, decode_values
from hpctrain.data.format.shard_file import check_shard, check_shard_size
from hpctrain.data.format.token_windows import read_windows
from hpctrain.data.hdf5.layout import DatasetLayout
from hpctrain.data.reading.field_reader import ChunkCache, DecodeThreads, ReadTask, default_threads
from hpctrain.data.reading.open_shard import IoMode, OpenShard, choose
from hpctrain.errors import DataError, UsageError

__all__ = ["CACHE_BYTES", "ContentChecker", "Dataset", "IoMode", "ShardLocator", "Verify", "check_shard"]

# Decodes the fields of a batch after their stored values were read, shard by shard.


Arrays = Mapping[str, NDArray[Any]]


@final
class FieldDecoder:
    """Converts stored values to the values of a batch: scale, offset, missing values. Thread-safe.

    Only the fields that are listed in `Manifest.decoding` are converted.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.fields = manifest.batch_fields
        """Fields of a decoded batch, by name."""
        self.stored_fields = manifest.stored_batch_fields
        """Fields that must be read from the files to make a decoded batch, by name, as they are before decoding."""

    def arrays(self, num_samples: int, *, out: Arrays | None) -> tuple[dict[str, NDArray[Any]], Arrays]:
        """Returns two dicts of arrays by field name: the arrays of the batch, and the arrays for the stored values.

        The stored values are read from the files into the second dict. Each array has `num_samples` rows. A field that
        is not decoded has the same array in both dicts. An array that `out` has for a field is used for the batch; the
        other arrays are new.
        """
        given = out or {}
        batch = {
            name: given[name] if name in given else np.empty((num_samples, *spec.shape), spec.dtype)
            for name, spec in self.fields.items()
        }
        if not self._manifest.decoding:
            return batch, batch
        decoded = self._manifest.decoding
        stored = {
            name: batch[name]
            if name in batch and name not in decoded
            else np.empty((num_samples, *spec.shape), spec.dtype)
            for name, spec in self.stored_fields.items()
        }
        return batch, stored

    def decode(
        self, stored: Arrays, batch: Arrays, *, groups: Sequence[tuple[int, NDArray[np.int64] | None]]
    ) -> None:
        """Decodes the values in `stored` and writes them to the arrays in `batch`; both are dicts by field name.

        `groups` contains one pair per shard: the index of the shard, and the batch rows that hold the shard's samples
        (None: all rows). Raises DataError that names the field and the shard if a value cannot be decoded.
        """
        for name, how in self._manifest.decoding.items():
            for number, places in groups:
                where = slice(None) if places is None else places
                entry = self._manifest.shards[number]
                try:
                    values, missing = decode_values(
                        stored[name][where],
                        packing=entry.fields[name].packing or Packing(),
                        decoding=how,
                        mask=None if how.mask is None else stored[how.mask][where],
                    )
                except DataError as error:
                    raise DataError(f"field {name!r} of shard {entry.file}: {error}") from error
                batch[name][where] = values
                if how.missing == "mask":
                    batch[name + MASK_SUFFIX][where] = missing


# Reads samples by index into batches.


CACHE_BYTES = 64 << 20
# Share of the node's memory that may be mapped if `cache_bytes` is not given. Mapped pages belong to the page cache,
# and the kernel reclaims them first.
MAPPED_SHARE = 0.25


class Verify(str, Enum):
    """What is checked of every shard when a dataset is opened.

    OFF: Nothing.
    SIZES: The size of the file, and for indexed files the modification time. Costs one `stat` per shard.
    HEADERS: In addition the HDF5 headers, and the location, dtype and shape of each field. Opens each shard.

    The headers are also checked when a shard is first read. None of these modes checks the values of the samples:
    use `hpctrain.data.verify_dataset` or `check_while_reading` for that.
    """

    OFF = "off"
    SIZES = "sizes"  # the file's size; of indexed files also the modification time: one `stat` for each shard
    HEADERS = "headers"  # also the HDF5 headers, and extent, dtype and shape of each field: opens each shard


class ContentChecker(Protocol):
    """Interface of a checker that looks for damaged samples before a dataset reads them."""

    def before_read(self, shard_index: int, field_name: str, rows: NDArray[np.int64], /) -> None:
        """Checks samples of a field before they are read. Raises DataError if they are damaged.

        `rows` are the indices of the samples within the shard: int64, shape (n,), in any order.
        """


class ShardLocator(Protocol):
    """Interface of a class that finds copies of shards on faster storage, such as that of the node."""

    def path(self, shard_index: int) -> Path | None:
        """Returns the path of a complete copy of the shard's file, or None if the original file should be read."""


class Dataset:
    """An opened dataset, which reads samples by index. Create it with `open`.

    Reading is safe from several threads, and after a fork. No method communicates between ranks.

    Attributes:
        directory: Directory of the dataset.
        manifest: Description of the dataset's content.
        checker: Checks samples before each read, such as a `BlockChecker`; None: samples are not checked.
        locator: Called when a shard is opened, to find a copy of the shard; None: the original is always read.
    """

    def __init__(
        self,
        directory: Path,
        *,
        manifest: Manifest,
        io: IoMode = IoMode.AUTO,
        cache_bytes: int | None = None,
        decode_threads: int | None = None,
    ) -> None:
        """Do not call this; use `open`. Raises UsageError for a negative `cache_bytes` or `decode_threads` below 1."""
        if (cache_bytes is not None and cache_bytes < 0) or (
            decode_threads is not None and decode_threads < 1
        ):
            raise UsageError(
                f"cache_bytes is {cache_bytes} and decode_threads is {decode_threads}: "
                "at least 0 bytes and 1 thread are needed"
            )
        self.directory = directory
        self.manifest = manifest
        self.asked_cache_bytes = cache_bytes
        self.cache_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
        self.decode_threads = default_threads() if decode_threads is None else decode_threads
        self.asked_io = IoMode(io)
        map_bytes = int(MAPPED_SHARE * psutil.virtual_memory().total) if cache_bytes is None else cache_bytes
        self.io = choose(
            self.asked_io, directory=directory, file_bytes=manifest.file_bytes, map_bytes=map_bytes
        )
        """MAP or READ: how contiguous fields are read."""
        self.checker: ContentChecker | None = None
        self.locator: ShardLocator | None = None
        self.decoder = FieldDecoder(manifest)
        # shape (num_shards + 1,): first sample of each shard, then the number of samples
        self._starts = np.concatenate(
            [[0], np.cumsum([shard.samples for shard in manifest.shards], dtype=np.int64)]
        ).astype(np.int64)
        self._windows = read_windows(directory, manifest=manifest)
        self._layouts: dict[int, dict[str, DatasetLayout]] = {}
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A shard takes up to three descriptors; the process needs some for sockets and other files.
        self._max_open = 4096 if soft_limit == resource.RLIM_INFINITY else min(4096, max(8, soft_limit // 5))
        self._reset()

    is_thread_safe: Final = True

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._cache = ChunkCache(capacity_bytes=self.cache_bytes)
        self._threads = DecodeThreads(num_threads=self.decode_threads)
        self._pid = os.getpid()  # last: a thread that reads it may use all of the above

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        verify: Verify | str = Verify.HEADERS,
        io: IoMode | str = IoMode.AUTO,
        cache_bytes: int | None = None,
        decode_threads: int | None = None,
    ) -> Dataset:
        """Opens a dataset. Not collective.

        Args:
            directory: Directory of the dataset, with its manifest.
            verify: What is checked of every shard now: "off", "sizes" or "headers" (see `Verify`).
            io: How contiguous fields are read: "map" (memory map), "read" (pread), or "auto".
            cache_bytes: Maximum size in bytes of the cache of decoded chunks, over all shards. With io "auto" this is
                also the maximum size of a dataset that is memory-mapped. None: 64 MiB for the cache, and a quarter of
                the node's memory for maps.
            decode_threads: Number of threads that decode chunks; None: the number of cores of the process, at most 4.

        Returns:
            The opened dataset.

        Raises:
            DataError: If there is no complete dataset in the directory, or if a checked file differs from the
                manifest.
            UsageError: For an invalid `cache_bytes` or `decode_threads`.
        """
        directory = Path(directory)
        dataset = cls(
            directory,
            manifest=read_manifest(directory),
            io=IoMode(io),
            cache_bytes=cache_bytes,
            decode_threads=decode_threads,
        )
        dataset.check_files(range(len(dataset.manifest.shards)), verify=verify)
        return dataset

    def check_files(self, shards: Iterable[int], *, verify: Verify | str) -> None:
        """Checks the files of some shards.

        Args:
            shards: Indices of the shards in the manifest.
            verify: What to check, as in `open`.

        Raises:
            DataError: If a file differs from the manifest. The message names the shard.
        """
        verify = Verify(verify)
        if verify is Verify.OFF:
            return
        for index in shards:
            if verify is Verify.HEADERS:
                self._layout(index)
            else:
                check_shard_size(self.directory, manifest=self.manifest, entry=self.manifest.shards[index])

    def __repr__(self) -> str:
        return f"Dataset({str(self.directory)!r}, num_samples={self.num_samples}, fields={list(self.fields)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that unpickles it opens the files again.
        return (
            _reopen,
            (self.directory, self.manifest, self.asked_io, self.asked_cache_bytes, self.decode_threads),
        )

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_samples(self) -> int:
        return self.manifest.samples

    @property
    def fields(self) -> dict[str, FieldSpec]:
        """dtype and shape of each field of a sample in a batch, after decoding, by field name.

        The lengths of samples of variable length, and the masks of missing values, are fields, too.
        """
        return self.decoder.fields

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Facts that were recorded when the dataset was packed, such as number of classes, vocabulary or source."""
        return self.manifest.attributes

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Reads samples by index. Thread-safe, not collective.

        Args:
            indices: Indices of the samples in the dataset: int64, shape (n,), in any order. Repeats are allowed, and
                so is an empty array.
            out: Arrays to fill instead of new ones, by field name, for some or all fields. Each must have exactly the
                shape and dtype of the result.

        Returns:
            For each field a native-endian array of shape (n, *sample_shape).

        Raises:
            DataError: If an index is out of range, or if a file is missing, has become shorter, or cannot be read or
                decoded. The message then names the shard, and the content of the arrays is undefined.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise DataError(
                f"samples {indices.min()} to {indices.max()} were requested from {self.directory}, "
                f"which has samples 0 to {self.num_samples - 1}"
            )
        arrays, stored = self.decoder.arrays(len(indices), out=out)
        if len(indices):
            specs = self.decoder.stored_fields
            direct = {name: _as_readable(array, specs[name]) for name, array in stored.items()}
            groups = self._by_shard(indices)
            self._fill(direct, indices, groups=groups)
            for name, array in stored.items():
                if direct[name] is not array:
                    array[...] = direct[name]
            self.decoder.decode(stored, arrays, groups=groups)
        return arrays

    def _fill(
        self, arrays: Mapping[str, NDArray[Any]], indices: NDArray[np.int64],
        *, groups: Sequence[tuple[int, NDArray[np.int64] | None]],
    ) -> None:  # fmt: skip
        tasks: list[ReadTask] = []
        num_begun = 0
        for number, places in groups:
            if tasks and num_begun >= self._max_open // 2:
                # Pending tasks keep their files open, even after eviction: run them before more files are opened.
                self._threads.run(tasks)
                tasks, num_begun = [], 0
            num_begun += 1
            samples = (indices if places is None else indices[places]) - self._starts[number]
            shard = self._shard(number)
            shard.check_size()
            for name in self.manifest.fields:
                if self.checker is not None:
                    self.checker.before_read(number, name, samples)
                tasks += shard.begin(name, samples=samples, arrays=arrays, places=places)
        if tasks:
            self._threads.run(tasks)

    def _by_shard(self, indices: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64] | None]]:
        """Groups the samples `indices` by shard: one pair per shard, its index and the batch rows of its samples.

        The rows are None if all rows of the batch belong to this shard.
        """
        if len(self.manifest.shards) == 1:
            return [(0, None)]
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        order = np.argsort(shard_of, kind="stable")
        borders = np.flatnonzero(np.diff(shard_of[order])) + 1
        if not len(borders):
            return [(int(shard_of[0]), None)]
        return [(int(shard_of[group[0]]), group) for group in np.split(order, borders)]

    def forget(self, shard_index: int) -> None:
        """Closes the file of a shard. The next read of the shard opens the file again.

        Call this method after the locator has found another path for the shard, or after the file was restored.

        Args:
            shard_index: Index of the shard in the manifest.
        """
        with self._lock:
            self._open.pop(shard_index, None)

    def _layout(self, index: int) -> dict[str, DatasetLayout]:
        if index not in self._layouts:
            entry = self.manifest.shards[index]
            self._layouts[index] = check_shard(self.directory, manifest=self.manifest, entry=entry)
        return self._layouts[index]

    def _shard(self, index: int) -> OpenShard:
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            shard = self._open.get(index)
            if shard is None:
                shard = self._open[index] = self._open_shard(index)
                if len(self._open) > self._max_open:
                    # Not closed, since another thread may be reading from it: closed with the last reference.
                    self._open.popitem(last=False)
            self._open.move_to_end(index)
            return shard

    def _open_shard(self, index: int) -> OpenShard:
        copy = self.locator.path(index) if self.locator is not None else None
        layouts = self._layouts.get(index)
        if layouts is None and copy is not None:
            # The original may have been deleted, or be slow to read; the layout of a complete copy is the same.
            layouts = self._layouts[index] = check_shard(
                self.directory, manifest=self.manifest, entry=self.manifest.shards[index], path=copy
            )
        windows = None
        if self._windows is not None:
            windows = self._windows[self._starts[index] : self._starts[index + 1]]
        return OpenShard(
            self.directory / self.manifest.shards[index].file if copy is None else copy,
            index=index,
            manifest=self.manifest,
            layouts=self._layout(index),
            io=self.io,
            cache=self._cache,
            windows=windows,
            is_copy=copy is not None,
        )


def _as_readable(array: NDArray[Any], spec: FieldSpec) -> NDArray[Any]:
    """Returns `array` if it is C-contiguous and has the dtype of `spec`, else a new array of the same shape.

    The new array is not initialised.
    """
    if array.flags.c_contiguous and array.dtype == np.dtype(spec.dtype):
        return array
    return np.empty(array.shape, dtype=spec.dtype)


def _reopen(
    directory: Path, manifest: Manifest, io: IoMode, cache_bytes: int | None, decode_threads: int
) -> Dataset:
    return Dataset(
        directory, manifest=manifest, io=io, cache_bytes=cache_bytes, decode_threads=decode_threads
    )


# Reads one number for each sample, from a field of the dataset or from a .npy file.


_ROWS_AT_ONCE = 1 << 18


def read_column(dataset: Dataset, source: str) -> NDArray[Any]:
    """Returns one number per sample of the dataset, such as a weight or a class: shape (num_samples,).

    The numbers are in the order of the dataset's samples. `source` is the name of a field with one number per sample,
    or the path of a .npy file. No other field is read. The whole column is held in memory. Raises DataError if `source`
    is neither, or if the column has another shape, or a dtype other than bool, integer or float.
    """
    if source in dataset.fields:
        column = _field(dataset, source)
    elif source.endswith(".npy"):
        column = _file(Path(source))
    else:
        raise DataError(
            f"{source!r} is not a field of {dataset.directory}, which has {', '.join(dataset.fields)}, nor a .npy file"
        )
    if column.shape != (dataset.num_samples,) or column.dtype.kind not in "biuf":
        raise DataError(
            f"{source!r} is {column.dtype.name} of shape {column.shape}; one number for each of the "
            f"{dataset.num_samples} samples of {dataset.directory} is needed"
        )
    return column


def _field(dataset: Dataset, name: str) -> NDArray[Any]:
    spec = dataset.fields[name]
    if spec.shape not in ((), (1,)):
        raise DataError(
            f"field {name!r} of {dataset.directory} has shape {spec.shape} in each sample: one number is needed"
        )
    only = Dataset(dataset.directory, manifest=_with_one_field(dataset.manifest, name))
    column = np.empty((dataset.num_samples, *spec.shape), dtype=spec.dtype)
    for first in range(0, len(column), _ROWS_AT_ONCE):
        indices = np.arange(first, min(first + _ROWS_AT_ONCE, len(column)), dtype=np.int64)
        only.gather(indices, out={name: column[first : first + len(indices)]})
    return column.reshape(len(column))


def _with_one_field(manifest: Manifest, name: str) -> Manifest:
    # The structure hash covers all bytes outside the fields, so it is not valid for a subset of the fields.
    how = manifest.decoding.get(name)
    names = [name] if how is None or how.mask is None else [name, how.mask]
    shards = tuple(
        entry.model_copy(
            update={"fields": {each: entry.fields[each] for each in names}, "structure_hash": None}
        )
        for entry in manifest.shards
    )
    fields = {each: manifest.fields[each] for each in names}
    decoding = {} if how is None else {name: how}
    return manifest.model_copy(update={"fields": fields, "decoding": decoding, "shards": shards})


def _file(path: Path) -> NDArray[Any]:
    try:
        column: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array: {error}") from error
    return column


# Opens one dataset on all ranks: the manifest is read once per node, and each shard's file is checked by
# one rank.


def open_together(
    world: World,
    directory: Path,
    *,
    reads_manifest: bool,
    verify: Verify | str = Verify.SIZES,
    **options: Any,
) -> Dataset:
    """Opens a dataset on every rank, with few accesses to the shared filesystem. Collective.

    The cost is one read of the manifest per node, and one `stat` or one opening of each shard. With N ranks, rank r
    checks the shards r, r + N, r + 2N, ..., so the shards must be on a filesystem that all nodes share. Copies on the
    nodes' own storage are checked when they are first read.

    Args:
        world: The ranks that open the dataset.
        directory: Directory of the dataset.
        reads_manifest: True if this rank reads the manifest file and compares it with the manifest of rank 0, which
            all ranks use. Pass True on rank 0 and on one rank per node, to detect a node on which this path leads to
            another dataset.
        verify: What is checked of every shard, as in `Dataset.open`.
        **options: Further arguments of `Dataset.open`.

    Returns:
        The opened dataset.

    Raises:
        DataError: If any rank cannot open the dataset. Raised on every rank, with the same message.
    """

    path = str(directory.absolute())
    # A rank that was started in another folder may see another dataset.
    reads = broadcast_json(world, path) != path or reads_manifest or world.rank == 0
    mine = agreed(world, lambda: read_manifest(directory) if reads else None, os_error=DataError)
    manifest = Manifest.model_validate(
        broadcast_json(world, mine.model_dump(mode="json") if mine is not None and world.rank == 0 else None)
    )
    check_same(
        world, name=f"the content of {directory}", value=(mine or manifest).fingerprint, error=DataError
    )

    def open_files() -> Dataset:
        dataset = Dataset(directory, manifest=manifest, **options)
        dataset.check_files(range(world.rank, len(manifest.shards), world.num_ranks), verify=verify)
        return dataset

    return agreed(world, open_files, os_error=DataError)
