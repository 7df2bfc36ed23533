"""Reads fields chunk by chunk: decodes each chunk once per batch, caches it if it fits, and copies its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.reading.chunk_cache import Chunk, ChunkCache, ChunkKey
from hpctrain.data.reading.decode_pool import Task
from hpctrain.data.reading.field_reader import ROW_COPY_BYTES, FieldName, Request
from hpctrain.errors import DataError

# Number of tasks for the samples of a batch, if each sample is one chunk.
_ALONE_TASKS = 8
# The cache is bypassed if the field of the shard has at least this many times its capacity.
_HARDLY = 8


class ChunkSource(Protocol):
    """Reads and decodes chunks. Thread-safe."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole field: (rows, *rest of a row)."""

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of a chunk. Chunks at the borders may be smaller, or extend beyond the field."""

    def inflate_row(self, row: int) -> bytes | None:
        """Returns the bytes of row `row` if it is one chunk that only needs inflating; None: call `load`."""

    def load(self, place: tuple[int, ...]) -> Chunk:
        """Returns the chunk at that index per dimension. Raises DataError, OSError, RuntimeError, ValueError."""


class ChunkedField:
    """Reads one field of one shard from a `ChunkSource`."""

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

    def begin(self, request: Request) -> Sequence[Task]:
        if self._passes_by_the_cache(request):
            places, starts, samples = request.all_places, request.starts, request.samples
            count = min(_ALONE_TASKS, len(places))
            return [
                partial(
                    self._copy_alone, request, places[part::count], starts[part::count], samples[part::count]
                )
                for part in range(count)
            ]
        rows_a_chunk, extent = self._source.chunk_shape[0], request.rows_a_sample
        first = request.starts // rows_a_chunk
        counts = (request.starts + (extent - 1)) // rows_a_chunk - first + 1
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

    def _passes_by_the_cache(self, request: Request) -> bool:
        """True if each chunk is one row, requested once, and the cache is too small to be likely to hold it."""
        if not self._is_alone or request.rows_a_sample != 1 or request.lengths is not None:
            return False
        if self._source.shape[0] * request.sample_bytes < _HARDLY * self._cache.capacity_bytes:
            return False
        return len(np.unique(request.starts)) == len(request.starts)

    def _copy_alone(
        self,
        request: Request,
        places: NDArray[np.int64],
        starts: NDArray[np.int64],
        samples: NDArray[np.int64],
    ) -> None:
        """Decodes and copies samples that are one chunk each."""
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
        request: Request,
        which: NDArray[np.int64],
        places: NDArray[np.int64],
        starts: NDArray[np.int64],
    ) -> None:
        """Copies the rows that lie in chunk `place`, for samples `which` of the request.

        places, starts: rows of the target and first rows in the field, of the same samples.
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
        extent, rows_a_chunk = request.rows_a_sample, self._source.chunk_shape[0]
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
            begin, end = max(row, 0), min(row + extent, rows_a_chunk)
            target[at, begin - row : end - row] = values[begin:end]
