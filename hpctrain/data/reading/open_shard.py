"""One open file of a dataset, with a reader for each of its fields."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest import LENGTH_SUFFIX, Manifest
from hpctrain.data.format.shard_file import check_unchanged, cut_short
from hpctrain.data.hdf5.filters import can_undo
from hpctrain.data.hdf5.layout import DatasetLayout, RowReader
from hpctrain.data.reading.chunked import ChunkedField, ClassBlocks, NumberBlocks, RaggedBlocks, StoredChunks
from hpctrain.data.reading.contiguous import MappedField, ReadField
from hpctrain.data.reading.field_reader import (
    ChunkCache,
    FieldName,
    FieldReader,
    OpenFile,
    ReadRequest,
    ReadTask,
)
from hpctrain.errors import DataError
from hpctrain.storage import filesystem_of

# How files are read: through memory maps or with read calls; and the choice for a given filesystem.


class IoMode(str, Enum):
    """How the bytes of contiguous data, and of chunks that are decoded without HDF5, are read from a file."""

    AUTO = "auto"  # see `choose`
    MAP = "map"  # copy from memory maps: fastest once the pages are mapped; a disk error kills the rank (SIGBUS)
    READ = "read"  # preadv into the batch, which needs no other memory; a disk error raises DataError


def choose(mode: IoMode, *, directory: Path, file_bytes: int, map_bytes: int) -> IoMode:
    """Returns how to read a dataset: `mode` itself, or for AUTO a choice between MAP and READ.

    AUTO becomes MAP if `directory` is on a local filesystem and the size of all files together, `file_bytes`, is at
    most `map_bytes`. Else AUTO becomes READ. Mapping a page costs more than reading the page once, so maps are for
    datasets that stay mapped. Mapped pages belong to the page cache, which the kernel reclaims when it needs memory,
    but they count as memory of the process.
    """
    if mode is not IoMode.AUTO:
        return mode
    fits = file_bytes <= map_bytes
    return IoMode.READ if not fits or filesystem_of(directory).is_shared else IoMode.MAP


# One open file of a dataset, with a reader for each of its fields.


class OpenShard:
    """An open file of a dataset, from which samples of one shard are read. Thread-safe.

    The file is the shard's original file, or with `is_copy` a copy of it. The file is closed when the last reference to
    this object is deleted. If the manifest has a list of token windows, `windows` contains the index of the first token
    of each sample: int64, shape (samples,). Else `windows` is None. Raises DataError if the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        index: int,
        manifest: Manifest,
        layouts: Mapping[str, DatasetLayout],
        io: IoMode,
        cache: ChunkCache,
        windows: NDArray[np.int64] | None,
        is_copy: bool,
    ) -> None:
        self.path = path
        self._index = index
        self._manifest = manifest
        self._entry = manifest.shards[index]
        self._layouts = layouts
        self._cache = cache
        self._windows = windows
        self._is_copy = is_copy
        self._reader: RowReader | None = None
        self._map: mmap.mmap | None = None
        ends = [
            layout.offset + int(np.prod(layout.shape, dtype=np.int64)) * layout.dtype.itemsize
            for layout in layouts.values()
            if layout.offset is not None
        ]
        self._needed_bytes = max(ends, default=0)
        try:
            self._file = OpenFile(path)
            self.check_size()
            # Mapping a file with a single sample costs more than reading it.
            if io is IoMode.MAP and self._entry.samples > 1:
                self._map = mmap.mmap(self._file.descriptor, 0, access=mmap.ACCESS_READ)
                self._needed_bytes = len(self._map)
            self._fields = {name: self._field_reader(name) for name in self._entry.fields}
        except FileNotFoundError:
            raise DataError(
                f"shard {path} is missing, it existed before: restore it, or restart the run with data without it"
            ) from None
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(f"shard {path} cannot be opened: {error}") from error

    def check_size(self) -> None:
        """Raises DataError if the file is too short, or is an indexed file that was modified. Called once per batch.

        Access to a map beyond the end of its file would kill the process with SIGBUS.
        """
        status = os.fstat(self._file.descriptor)
        if status.st_size < self._needed_bytes:
            raise DataError(cut_short(self.path, self._entry, status.st_size))
        check_unchanged(status, entry=self._entry, path=self.path, is_copy=self._is_copy)

    def begin(
        self,
        field: str,
        *,
        samples: NDArray[np.int64],
        arrays: Mapping[str, NDArray[Any]],
        places: NDArray[np.int64] | None,
    ) -> Sequence[ReadTask]:
        """Begins to read samples of a field into arrays[field][places].

        Returns the tasks that the caller must run to read the remaining samples. `samples` are the indices of the
        samples within the shard, `places` the rows of the arrays to fill: both int64, shape (n,). If `places` is None,
        all rows are filled, in order. The arrays are C-contiguous and native-endian.
        """
        spec, stored = self._manifest.fields[field], self._entry.fields[field]
        array = arrays[field]
        lengths = arrays.get(field + LENGTH_SUFFIX) if spec.kind == "ragged" else None
        if self._manifest.tokens is not None:
            starts = stored.first_row + (
                samples * self._manifest.tokens.stride if self._windows is None else self._windows[samples]
            )
            target = array  # (batch, tokens of a window)
        elif not stored.whole:
            starts = stored.first_row + samples
            target = array.reshape(len(array), 1, *spec.shape)
        else:
            starts = np.zeros_like(samples)
            target = array.reshape(len(array), *(spec.shape or (1,)))
            if lengths is not None:
                rows = self._layouts[field].shape[0]
                where = slice(None) if places is None else places
                lengths[where] = rows
                if rows < spec.shape[0]:
                    return self._begin_padded(field, samples=samples, array=target, places=places, rows=rows)
                lengths = None
        request = ReadRequest(samples=samples, starts=starts, places=places, target=target, lengths=lengths)
        return self._fields[field].begin(request)

    def _begin_padded(
        self,
        field: str,
        *,
        samples: NDArray[np.int64],
        array: NDArray[Any],
        places: NDArray[np.int64] | None,
        rows: int,
    ) -> Sequence[ReadTask]:
        """Begins to read samples that are shorter than the longest sample, and fills their remaining rows with zeros.

        Each sample is a whole HDF5 dataset of `rows` rows. Returns the tasks that the caller must run to read the
        samples into `array`.
        """
        where = np.arange(len(array)) if places is None else places
        array[where, rows:] = 0
        tasks: list[ReadTask] = []
        if rows:
            for number, place in enumerate(where.tolist()):
                one = samples[number : number + 1]
                request = ReadRequest(
                    samples=one,
                    starts=np.zeros_like(one),
                    places=None,
                    target=array[place : place + 1, :rows],
                )
                tasks += self._fields[field].begin(request)
        return tasks

    def _field_reader(self, name: str) -> FieldReader:
        spec, stored, layout = self._manifest.fields[name], self._entry.fields[name], self._layouts[name]
        field = FieldName(path=self.path, field=name)
        if layout.offset is not None and stored.member is None and spec.kind != "classes":
            layout = layout if layout.shape else _as_one_row(layout)
            if self._map is not None:
                return MappedField(self._map, layout=layout)
            return ReadField(self._file, layout=layout, name=field)
        if self._reader is None:
            self._reader = RowReader(self.path)
        source: StoredChunks | NumberBlocks
        plain = stored.member is None and not layout.only_hdf5 and spec.kind != "classes"
        if plain and layout.chunks is not None and can_undo(layout.filters):
            source = StoredChunks(
                self._reader, file=self._file, mapped=self._map, dataset=stored.dataset, layout=layout
            )
        else:
            source = self._blocks(name)
        return ChunkedField(source, cache=self._cache, shard=self._index, name=field)

    def _blocks(self, name: str) -> NumberBlocks:
        """Returns an object that reads the field `name` through h5py, in blocks of rows.

        It is used for data that only HDF5 can decode.
        """
        assert self._reader is not None
        spec, stored, layout = self._manifest.fields[name], self._entry.fields[name], self._layouts[name]
        member = () if stored.member is None else layout.dtype[stored.member].shape
        shape = (*layout.shape, *member)
        is_scalar = not shape
        shape = shape or (1,)
        dtype = np.dtype(spec.dtype)
        options: dict[str, Any] = {
            "dataset": stored.dataset,
            "member": stored.member,
            "dtype": dtype,
            "chunk_rows": layout.chunks[0] if layout.chunks else None,
            "is_scalar": is_scalar,
        }
        if spec.kind == "classes":
            return ClassBlocks(self._reader, shape=shape[:1], classes=spec.classes, **options)
        if spec.kind == "ragged" and not stored.whole:
            return RaggedBlocks(self._reader, shape=(shape[0], *spec.shape), **options)
        return NumberBlocks(self._reader, shape=shape, **options)


def _as_one_row(layout: DatasetLayout) -> DatasetLayout:
    return DatasetLayout(shape=(1,), dtype=layout.dtype, offset=layout.offset)
