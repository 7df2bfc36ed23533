"""Reads fields chunk by chunk: decodes each chunk once per batch, caches the chunk if it fits, and copies its rows."""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.hdf5.chunk_index import ChunkAccess, ChunkIndex, read_chunk_access, read_chunk_index
from hpctrain.data.hdf5.filters import DEFLATE, Bytes, undo
from hpctrain.data.hdf5.layout import ChunkPlace, DatasetLayout, RowReader, class_texts
from hpctrain.data.reading.field_reader import (
    ROW_COPY_BYTES,
    ChunkCache,
    ChunkKey,
    DecodedChunk,
    FieldName,
    OpenFile,
    ReadRequest,
    ReadTask,
)
from hpctrain.errors import DataError

# Number of tasks for the samples of a batch, if each sample is one chunk.
_ALONE_TASKS = 8
# The cache is bypassed if the field of the shard has at least this many times its capacity.
_HARDLY = 8


class ChunkSource(Protocol):
    """Interface of a class that reads and decodes the chunks of a field. Thread-safe."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole field: (rows, *shape of a row)."""

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk. Chunks at the borders may be smaller, or extend beyond the field."""

    def inflate_row(self, row: int) -> bytes | None:
        """Returns the decompressed bytes of a row, if the row is one chunk that is compressed with deflate only.

        Returns None in all other cases: then call `load`.
        """

    def load(self, place: tuple[int, ...]) -> DecodedChunk:
        """Returns the decoded chunk. `place` is the index of the chunk in each dimension.

        Raises DataError, OSError, RuntimeError or ValueError.
        """


class ChunkedField:
    """Reads one field of one shard. A `ChunkSource` decodes the chunks of the field."""

    def __init__(self, source: ChunkSource, *, cache: ChunkCache, shard: int, name: FieldName) -> None:
        self._source = source
        self._cache = cache
        self._shard = shard
        self._name = name
        # Indices of the chunks of a row, in all dimensions but the first.
        self._columns = list(
            product(
                *(
                    range(-(-size // part))
                    for size, part in zip(source.shape[1:], source.chunk_shape[1:], strict=True)
                )
            )
        )

        # For each of these chunks: its part of the row, as slices of the row and of the chunk.
        self._slices: dict[tuple[int, ...], tuple[tuple[slice, ...], tuple[slice, ...]]] = {}
        for columns in self._columns:
            of_row, of_chunk = [slice(None), slice(None)], [slice(None)]
            for number, size, part in zip(columns, source.shape[1:], source.chunk_shape[1:], strict=True):
                stop = min(size, (number + 1) * part)
                of_row.append(slice(number * part, stop))
                of_chunk.append(slice(0, stop - number * part))
            self._slices[columns] = tuple(of_row), tuple(of_chunk)
        self._is_whole_row = source.shape[1:] == source.chunk_shape[1:]
        self._is_alone = self._is_whole_row and source.chunk_shape[0] == 1  # each chunk is one row

    def begin(self, request: ReadRequest) -> Sequence[ReadTask]:
        if self._passes_by_the_cache(request):
            places, starts, samples = request.all_places, request.starts, request.samples
            count = min(_ALONE_TASKS, len(places))
            return [
                partial(
                    self._copy_alone, request, places[part::count], starts[part::count], samples[part::count]
                )
                for part in range(count)
            ]
        rows_per_chunk, extent = self._source.chunk_shape[0], request.rows_per_sample
        first = request.starts // rows_per_chunk
        counts = (request.starts + (extent - 1)) // rows_per_chunk - first + 1
        which = np.repeat(np.arange(len(first)), counts)
        chunk = np.repeat(first, counts) + (
            np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        )
        order = np.argsort(chunk, kind="stable")
        which, chunk = which[order], chunk[order]
        places, starts = request.all_places[which], request.starts[which]
        borders = [0, *(np.flatnonzero(np.diff(chunk)) + 1).tolist(), len(chunk)]
        tasks = []
        for start, stop in pairwise(borders):
            for columns in self._columns:
                place = (int(chunk[start]), *columns)
                task = partial(
                    self._copy_from, place, request, which[start:stop], places[start:stop], starts[start:stop]
                )
                if self._cache.get(self._key(place)) is not None:
                    task()  # cheaper than handing it to a thread
                else:
                    tasks.append(task)
        return tasks

    def _passes_by_the_cache(self, request: ReadRequest) -> bool:
        """Returns True if the chunks of this request should be read without the cache.

        That is so if each chunk is one row, no row is requested twice, and the cache is so small that it is unlikely
        to contain the rows.
        """
        if not self._is_alone or request.rows_per_sample != 1 or request.lengths is not None:
            return False
        if self._source.shape[0] * request.sample_bytes < _HARDLY * self._cache.capacity_bytes:
            return False
        return len(np.unique(request.starts)) == len(request.starts)

    def _copy_alone(
        self,
        request: ReadRequest,
        places: NDArray[np.int64],
        starts: NDArray[np.int64],
        samples: NDArray[np.int64],
    ) -> None:
        """Decodes the samples of a request, each of which is one chunk, and copies them into the batch.

        For each sample, `places` is its row in the batch, `starts` its row in the HDF5 dataset, and `samples` its index
        in the shard.
        """
        target, load, columns = request.target, self._source.load, self._columns[0]
        inflate_row = self._source.inflate_row
        num_bytes, whole = request.sample_bytes, target.reshape(-1).view(np.uint8).data
        for number, (place, start) in enumerate(zip(places.tolist(), starts.tolist(), strict=True)):
            data = inflate_row(start)
            if data is not None:
                whole[place * num_bytes : (place + 1) * num_bytes] = data
                continue
            try:
                chunk = load((start, *columns))
            except (DataError, OSError, RuntimeError, ValueError, KeyError) as error:
                raise self._name.error(samples[number : number + 1], error) from error
            target[place, 0] = chunk.values[0]

    def _key(self, place: tuple[int, ...]) -> ChunkKey:
        return ChunkKey(self._shard, self._name.field, place)

    def _copy_from(
        self,
        place: tuple[int, ...],
        request: ReadRequest,
        which: NDArray[np.int64],
        places: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> None:
        """Copies the rows of one chunk into the target, for some samples of the request.

        `place` is the index of the chunk per dimension. `which` are the indices of the samples in the request. For
        each of these samples, `places` is its row in the target, and `starts` its first row in the field.
        """
        try:
            chunk = self._cache.get_or_make(self._key(place), partial(self._source.load, place))
        except (DataError, OSError, RuntimeError, ValueError, KeyError) as error:
            raise self._name.error(request.samples[which], error) from error
        of_row, of_chunk = self._slices[place[1:]]
        target, values = request.target, chunk.values
        if not self._is_whole_row:
            target, values = target[of_row], values[of_chunk]
        first_row = place[0] * self._source.chunk_shape[0]
        extent, rows_per_chunk = request.rows_per_sample, self._source.chunk_shape[0]
        if chunk.lengths is not None and request.lengths is not None:
            request.lengths[places] = chunk.lengths[starts - first_row]
        if extent == 1 and request.sample_bytes < ROW_COPY_BYTES:
            target[places, 0] = values[starts - first_row]
            return
        for at, start in zip(places.tolist(), starts.tolist(), strict=True):
            if extent == 1:
                target[at, 0] = values[start - first_row]
                continue
            row = start - first_row
            begin, end = max(row, 0), min(row + extent, rows_per_chunk)
            target[at, begin - row : end - row] = values[begin:end]


# Sources of chunks: the bytes of the file, decoded here; or h5py, for data that only HDF5 can decode.


# If the chunk index cannot be read, HDF5 looks up each chunk. HDF5 1.10 searches all chunks for that, so above this
# number of chunks it reads their bytes instead.
_MAX_LOOKED_UP = 4096
_BLOCK_BYTES = 1 << 20


class StoredChunks:
    """Reads HDF5 chunks from their byte ranges in the file, and decodes them without holding h5py's lock.

    The byte ranges are found in the file's chunk index. The bytes are read through a memory map or with pread. Chunks
    that are not stored, or that only HDF5 can read (see `ChunkAccess`), are read through h5py.
    """

    def __init__(
        self,
        reader: RowReader,
        *,
        file: OpenFile,
        dataset: str,
        layout: DatasetLayout,
        mapped: mmap.mmap | None = None,
    ) -> None:
        """`mapped` is a memory map of the whole file. If it is None, chunks are read with pread.

        The file must not become shorter while chunks are read.
        """
        assert layout.chunks is not None
        self.shape = layout.shape
        self.chunk_shape = layout.chunks
        self._reader = reader
        self._file = file
        self._mapped = None if mapped is None else memoryview(mapped)
        self._dataset = dataset
        self._layout = layout
        self._index: ChunkIndex | None = None
        self._access = ChunkAccess.VALUES  # without an index
        self._index_is_read = False
        self._places: dict[tuple[int, ...], ChunkPlace | None] = {}
        self._lock = threading.Lock()
        codes = [each.code for each in layout.filters]
        self._only_deflated = codes == [DEFLATE] and layout.dtype.isnative and layout.chunks[0] == 1
        self._no_other = (0,) * (len(layout.chunks) - 1)
        self._chunk_bytes = int(np.prod(layout.chunks, dtype=np.int64)) * layout.dtype.itemsize

    def load(self, place: tuple[int, ...]) -> DecodedChunk:
        first = tuple(number * size for number, size in zip(place, self.chunk_shape, strict=True))
        stored = self._stored(first)
        dtype = self._layout.dtype
        if stored is None:
            return DecodedChunk(values=self._reader.chunk(self._dataset, first=first, shape=self.chunk_shape))
        mask, data = stored
        decoded = undo(data, filters=self._layout.filters, mask=mask, num_bytes=self._chunk_bytes)
        if isinstance(decoded, memoryview) and self._mapped is not None:
            decoded = bytes(decoded)  # a cached view would keep the map, and so the file, open
        values: NDArray[Any] = np.frombuffer(decoded, dtype=dtype).reshape(self.chunk_shape)
        return DecodedChunk(values=values if dtype.isnative else values.astype(dtype.newbyteorder("=")))

    def inflate_row(self, row: int) -> bytes | None:
        """Returns the decompressed bytes of a row, if the row is one chunk that is compressed with deflate only.

        Returns None in all other cases, and after an error: then call `load`.
        """
        if not self._only_deflated:
            return None
        index = self._index
        try:
            if index is not None:  # the common case, kept short: this runs once per sample
                begin, num_bytes = index.offsets[row], index.sizes[row]
                if begin < 0 or index.masks[row]:
                    return None
                stored: Bytes
                if self._mapped is not None:
                    stored = self._mapped[begin : begin + num_bytes]
                else:
                    stored = os.pread(self._file.descriptor, num_bytes, begin)
            else:
                found = self._stored((row, *self._no_other))
                if found is None or found[0]:
                    return None
                stored = found[1]
            data = zlib.decompress(stored, bufsize=self._chunk_bytes)
        except (DataError, OSError, RuntimeError, zlib.error):
            return None
        return data if len(data) == self._chunk_bytes else None

    def _stored(self, first: tuple[int, ...]) -> tuple[int, Bytes] | None:
        """Returns the filter mask and the stored bytes of a chunk, or None if HDF5 must read the chunk.

        `first` is the index of the chunk's first element in each dimension.
        """
        if not self._index_is_read:
            self._read_index()
        if self._index is None and self._access is not ChunkAccess.PLACES:
            if self._access is ChunkAccess.VALUES:
                return None
            try:
                return self._reader.stored_chunk(self._dataset, first=first)
            except (OSError, RuntimeError, MemoryError):
                # Never written (HDF5 2.0 then returns any number of bytes to h5py), or damaged, which HDF5 then says.
                return None
        place = self._place(first)
        if place is None:
            return None
        if self._mapped is not None:  # beyond the end of the map, the read below reports the missing bytes
            view = self._mapped[place.offset : place.offset + place.num_bytes]
            if len(view) == place.num_bytes:
                return place.filter_mask, view
        data = os.pread(self._file.descriptor, place.num_bytes, place.offset)
        if len(data) == place.num_bytes:
            return place.filter_mask, data
        parts, offset, missing = [], place.offset, place.num_bytes
        while missing:
            part = os.pread(self._file.descriptor, missing, offset)
            if not part:
                raise DataError(
                    f"the file ends {missing} bytes before the end of a chunk: copy the file again, or pack again"
                )
            parts.append(part)
            offset += len(part)
            missing -= len(part)
        return place.filter_mask, parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_index(self) -> None:
        with self._lock:
            if self._index_is_read:
                return
            descriptor, base = self._file.descriptor, self._reader.user_block_bytes
            header = self._reader.header_offset(self._dataset)
            self._index = read_chunk_index(descriptor, header=header, layout=self._layout, base=base)
            if self._index is None:
                self._access = read_chunk_access(
                    descriptor,
                    header=header,
                    layout=self._layout,
                    base=base,
                    first_is_unlimited=self._reader.first_is_unlimited(self._dataset),
                )
                # HDF5 1.10 returns places that do not include the user block at the start of a file.
                if self._access is ChunkAccess.PLACES and (base or self._layout.num_chunks > _MAX_LOOKED_UP):
                    self._access = ChunkAccess.STORED
            self._index_is_read = True

    def _place(self, first: tuple[int, ...]) -> ChunkPlace | None:
        if self._index is not None:
            return self._index.place(tuple(f // c for f, c in zip(first, self.chunk_shape, strict=True)))
        if first in self._places:  # without the lock: entries are never removed
            return self._places[first]
        with self._lock:
            if first not in self._places:
                self._places[first] = self._reader.chunk_place(self._dataset, first=first)
            return self._places[first]


def block_rows(*, row_bytes: int, num_rows: int, chunk_rows: int | None) -> int:
    """Returns the number of rows to read through h5py at once, at most `num_rows`, the rows of the HDF5 dataset.

    A block of that many rows, of `row_bytes` bytes each, has about 1 MiB. If the data is chunked, with `chunk_rows`
    rows per chunk, a block consists of whole HDF5 chunks.
    """
    wanted = max(1, _BLOCK_BYTES // max(1, row_bytes))
    if chunk_rows is not None:
        wanted = max(1, wanted // chunk_rows) * chunk_rows
    return max(1, min(wanted, num_rows))


class NumberBlocks:
    """Reads a numeric field through h5py in blocks of rows. Used for unknown filters, compact data, compound types."""

    def __init__(
        self,
        reader: RowReader,
        *,
        dataset: str,
        member: str | None,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        chunk_rows: int | None,
        is_scalar: bool,
    ) -> None:
        """`shape` is the shape of the field: (rows, *shape of a row).

        Set `is_scalar` if the HDF5 dataset has no dimensions. It is then read as one row.
        """
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self.shape = shape
        self.chunk_shape = (
            block_rows(row_bytes=row_bytes, num_rows=shape[0], chunk_rows=chunk_rows),
            *shape[1:],
        )
        self._reader = reader
        self._dataset = dataset
        self._member = member
        self._dtype = dtype
        self._is_scalar = is_scalar

    def inflate_row(self, row: int) -> bytes | None:
        return None

    def load(self, place: tuple[int, ...]) -> DecodedChunk:
        return DecodedChunk(values=np.ascontiguousarray(self._rows(place[0]), dtype=self._dtype))

    def _rows(self, block: int) -> NDArray[Any]:
        if self._is_scalar:
            return self._reader.whole(self._dataset, member=self._member).reshape(1, *self.shape[1:])
        start = block * self.chunk_shape[0]
        stop = min(start + self.chunk_shape[0], self.shape[0])
        return self._reader.rows(self._dataset, start=start, stop=stop, member=self._member)


class ClassBlocks(NumberBlocks):
    """Reads strings as class indices, int64. Raises DataError for a string that is not one of the classes.

    The strings have fixed or variable length. The index of a string is its position in `classes`.
    """

    def __init__(self, *args: Any, classes: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._numbers = {name: number for number, name in enumerate(classes)}

    def load(self, place: tuple[int, ...]) -> DecodedChunk:
        names = class_texts(self._rows(place[0]))
        unknown = [name for name in names if name not in self._numbers]
        if unknown:
            raise DataError(
                f"{unknown[0]!r} is not one of the {len(self._numbers)} classes: index the files again"
            )
        return DecodedChunk(values=np.array([self._numbers[name] for name in names], dtype=np.int64))


class RaggedBlocks(NumberBlocks):
    """Reads samples of variable length, and pads them with zeros to length shape[1].

    `shape` is (number of rows, maximum length, *further dimensions). Raises DataError for a sample that is longer than
    shape[1].
    """

    def load(self, place: tuple[int, ...]) -> DecodedChunk:
        samples = self._rows(place[0])
        values = np.zeros((len(samples), *self.shape[1:]), dtype=self._dtype)
        lengths = np.empty(len(samples), dtype=np.int64)
        for number, sample in enumerate(samples):
            length = len(sample)
            if length > self.shape[1]:
                raise DataError(
                    f"a sample has length {length}, the manifest's maximum is {self.shape[1]}: "
                    "index the files again"
                )
            values[number, :length] = sample
            lengths[number] = length
        return DecodedChunk(values=values, lengths=lengths)
