"""Reads samples: from memory maps at the datasets' places in the files, or else through h5py.

Shards are opened when first needed, in the process that needs them: nothing is inherited through fork (an
HDF5 handle that is gives wrong data: pytorch#11887).
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import hdf5
from hpctrain.data.manifest import FieldSpec, Manifest, ShardEntry, read_manifest
from hpctrain.errors import DataError

# From this size on, one copy a sample costs less than gathering into a buffer and scattering from there.
_ROW_COPY_BYTES = 2048


class Verify(str, Enum):
    """How much is looked at when a dataset is opened. For the content itself see `hpctrain.data.verify`."""

    NOTHING = "nothing"  # each shard when it is first read
    SIZES = "sizes"  # every shard: file size, HDF5 header, extent, dtype and shape of each field


def check_shard(directory: Path, *, manifest: Manifest, entry: ShardEntry) -> dict[str, hdf5.Layout]:
    """Compare a shard's file with the manifest, without reading the samples; returns field -> layout.

    A shard that was re-packed with other HDF5 tools (chunks, compression) is accepted if shapes and dtypes
    fit. Raises DataError naming the shard, and the field where it matters.
    """
    path = directory / entry.file
    try:
        found_bytes = path.stat().st_size
        layouts = hdf5.inspect(path, names=[stored.dataset for stored in entry.fields.values()])
    except FileNotFoundError:
        raise DataError(
            f"shard {entry.file} of {directory} is missing (the manifest lists {len(manifest.shards)} "
            "shards): copy it again, or pack again"
        ) from None
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        if found_bytes < entry.file_bytes:
            raise DataError(_cut_short(path, entry, found_bytes)) from error
        raise DataError(f"shard {path} cannot be opened as HDF5: {error}") from error
    by_field = {}
    for name, stored in entry.fields.items():
        layout = layouts.get(stored.dataset)
        if layout is None:
            raise DataError(f"shard {path} has no dataset {stored.dataset!r} for field {name!r}: pack again")
        expected = manifest.stored_shape(name, samples=entry.samples)
        dtype = manifest.fields[name].dtype
        if layout.shape != expected or layout.dtype.name != dtype:
            raise DataError(
                f"field {name!r} of shard {path} is {layout.dtype.name} {layout.shape}, "
                f"the manifest says {dtype} {expected}: the shard belongs to another dataset, pack again"
            )
        if layout.offset is not None:
            if layout.offset + stored.num_bytes > found_bytes:
                raise DataError(_cut_short(path, entry, found_bytes))
            if found_bytes == entry.file_bytes and layout.offset != stored.offset:
                raise DataError(
                    f"field {name!r} of shard {path} begins at byte {layout.offset}, the manifest says "
                    f"{stored.offset}: its HDF5 header is damaged, restore it or pack again"
                )
        by_field[name] = layout
    return by_field


def _cut_short(path: Path, entry: ShardEntry, found_bytes: int) -> str:
    return (
        f"shard {path} is cut short: {found_bytes} bytes, the manifest says {entry.file_bytes} "
        f"({entry.samples} samples): copy it again, or pack again"
    )


class _OpenShard:
    """A mapped file with one view a field, shape (samples, *sample_shape); windows of a stream overlap."""

    def __init__(
        self, directory: Path, *, manifest: Manifest, entry: ShardEntry, layouts: dict[str, hdf5.Layout]
    ):
        self.path = directory / entry.file
        self._manifest = manifest
        self._entry = entry
        self._views: dict[str, NDArray[Any]] = {}
        self._rows: hdf5.RowReader | None = None
        self._needed_bytes = 0
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
            if any(layout.offset is None for layout in layouts.values()):
                self._rows = hdf5.RowReader(self.path)
        except (OSError, ValueError) as error:
            raise DataError(f"shard {self.path} cannot be opened: {error}") from error
        for name, layout in layouts.items():
            if layout.offset is not None:
                end = layout.offset + entry.fields[name].num_bytes
                if end > len(self._map):
                    raise DataError(_cut_short(self.path, entry, len(self._map)))
                self._needed_bytes = max(self._needed_bytes, end)
                self._views[name] = self._view(name, layout)

    def _view(self, name: str, layout: hdf5.Layout) -> NDArray[Any]:
        array: NDArray[Any] = np.ndarray(
            layout.shape, dtype=layout.dtype, buffer=self._map, offset=layout.offset or 0
        )
        windows = self._manifest.tokens
        if windows is None:
            return array
        return np.lib.stride_tricks.sliding_window_view(array, windows.window + 1)[:: windows.stride]

    def check_size(self) -> None:
        """Touching a map behind the end of its file kills the process with SIGBUS: look before each batch."""
        found_bytes = self._map.size()
        if found_bytes < self._needed_bytes:
            raise DataError(_cut_short(self.path, self._entry, found_bytes))

    def copy(
        self, name: str, *, rows: NDArray[np.int64], out: NDArray[Any], places: NDArray[np.int64] | None
    ) -> None:
        """out[places] = samples `rows` of field `name`; places None: all of out, in order."""
        view = self._views.get(name)
        if view is None:
            self._copy_through_h5py(name, rows=rows, out=out, places=places)
        elif places is None and view.dtype == out.dtype and view.flags.c_contiguous:
            # mode: the rows are checked already, and 'raise' would gather into a buffer first.
            np.take(view, rows, axis=0, out=out, mode="clip")
        elif self._manifest.fields[name].sample_bytes >= _ROW_COPY_BYTES:
            for place, row in zip(range(len(rows)) if places is None else places, rows, strict=True):
                out[place] = view[row]
        else:
            out[slice(None) if places is None else places] = view[rows]

    def _copy_through_h5py(
        self, name: str, *, rows: NDArray[np.int64], out: NDArray[Any], places: NDArray[np.int64] | None
    ) -> None:
        assert self._rows is not None
        dataset = self._entry.fields[name].dataset
        windows = self._manifest.tokens
        for number, row in enumerate(rows):
            place = number if places is None else places[number]
            try:
                if windows is None:
                    out[place] = self._rows.rows(dataset, start=int(row), stop=int(row) + 1)[0]
                else:
                    start = int(row) * windows.stride
                    out[place] = self._rows.rows(dataset, start=start, stop=start + windows.window + 1)
            except (OSError, RuntimeError, ValueError) as error:
                raise DataError(
                    f"field {name!r}, sample {int(row)} of shard {self.path} cannot be read: {error}"
                ) from error


class Dataset:
    """An opened dataset. Reading is safe from several threads, and after a fork. Never communicates."""

    def __init__(self, directory: Path, *, manifest: Manifest) -> None:
        """Use `Dataset.open`."""
        self.directory = directory
        self.manifest = manifest
        # (num_shards + 1,): first sample of each shard, and the number of samples
        self._starts = np.concatenate(
            [[0], np.cumsum([shard.samples for shard in manifest.shards], dtype=np.int64)]
        ).astype(np.int64)
        self._layouts: dict[int, dict[str, hdf5.Layout]] = {}
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # One descriptor a map; the process needs others for sockets and files.
        self._max_open = 4096 if soft_limit == resource.RLIM_INFINITY else min(4096, max(8, soft_limit // 4))
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    @classmethod
    def open(cls, directory: Path | str, *, verify: Verify | str = Verify.SIZES) -> Dataset:
        """Open the dataset in `directory`; `sizes` checks size, extent, dtype and shape of every shard.

        Raises DataError (see `read_manifest` and `check_shard`).
        """
        directory = Path(directory)
        dataset = cls(directory, manifest=read_manifest(directory))
        if Verify(verify) is Verify.SIZES:
            for index in range(len(dataset.manifest.shards)):
                dataset._layout(index)
        return dataset

    def __repr__(self) -> str:
        return f"Dataset({str(self.directory)!r}, num_samples={self.num_samples}, fields={list(self.fields)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the files itself.
        return (_reopen, (self.directory, self.manifest))

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_samples(self) -> int:
        return self.manifest.samples

    @property
    def fields(self) -> dict[str, FieldSpec]:
        """dtype and shape of each field of one sample."""
        return self.manifest.fields

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What the packer noted: number of classes, vocabulary, source, ..."""
        return self.manifest.attributes

    def gather(
        self, indices: NDArray[np.int64], *, out: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Samples by index: field -> native-endian array of shape (len(indices), *sample_shape).

        indices: shape (n,), any order, repeats allowed, n may be 0. out: arrays to fill instead of new ones,
        for some or all fields, of just that shape and dtype.
        Raises DataError naming the shard if an index is outside, or a file is missing or shorter than it was.
        """
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= self.num_samples):
            raise DataError(
                f"samples {indices.min()} to {indices.max()} were asked of {self.directory}, "
                f"which has 0 to {self.num_samples - 1}"
            )
        arrays = {
            name: out[name]
            if out is not None and name in out
            else np.empty((len(indices), *spec.shape), spec.dtype)
            for name, spec in self.fields.items()
        }
        if not len(indices):
            return arrays
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        touched = np.unique(shard_of)
        for number in touched:
            places = None if len(touched) == 1 else np.flatnonzero(shard_of == number)
            rows = (indices if places is None else indices[places]) - self._starts[number]
            shard = self._shard(int(number))
            shard.check_size()
            for name, array in arrays.items():
                shard.copy(name, rows=rows, out=array, places=places)
        return arrays

    def _layout(self, index: int) -> dict[str, hdf5.Layout]:
        if index not in self._layouts:
            entry = self.manifest.shards[index]
            self._layouts[index] = check_shard(self.directory, manifest=self.manifest, entry=entry)
        return self._layouts[index]

    def _shard(self, index: int) -> _OpenShard:
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            shard = self._open.get(index)
            if shard is None:
                shard = _OpenShard(
                    self.directory,
                    manifest=self.manifest,
                    entry=self.manifest.shards[index],
                    layouts=self._layout(index),
                )
                self._open[index] = shard
                if len(self._open) > self._max_open:
                    # Only forgotten, not closed: another thread may be reading from it.
                    self._open.popitem(last=False)
            self._open.move_to_end(index)
            return shard


def _reopen(directory: Path, manifest: Manifest) -> Dataset:
    return Dataset(directory, manifest=manifest)
