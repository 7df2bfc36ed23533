"""Plain reads of samples' bytes: the baseline for the speed of a loader.

The samples of a contiguous field are gathered from a memory map of its HDF5 dataset into one array per batch, as in a
hand-written loop. For chunked fields, the chunks that hold the samples are read with pread and not decoded. Nothing is
cached, checked or sorted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data import Dataset, Manifest, StoredField
from hpctrain.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mapped:
    """The samples of one contiguous field in one shard: shape (samples, ...)."""

    rows: NDArray[Any]

    def read(self, rows: NDArray[np.int64]) -> int:
        if self.rows.flags.c_contiguous:
            return int(np.take(self.rows, rows, axis=0, mode="clip").nbytes)
        return int(self.rows[rows].nbytes)  # windows overlap: take would copy the whole stream first


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunked:
    """The chunks of one field in one shard.

    Attributes:
        chunk_rows: The number of rows per chunk. Chunk row i, the chunks with index i along the first dimension, starts
            at row i * chunk_rows.
        places: For each chunk row, the file offset and the size in bytes of each of its chunks.
        rows_of: A function that converts samples to rows.
    """

    descriptor: int
    chunk_rows: int
    rows_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    places: dict[int, list[tuple[int, int]]]

    def read(self, rows: NDArray[np.int64]) -> int:
        num_bytes = 0
        for chunk_row in np.unique(self.rows_of(rows) // self.chunk_rows):
            for offset, size in self.places[int(chunk_row)]:
                num_bytes += len(os.pread(self.descriptor, size, offset))
        return num_bytes


class RawReader:
    """Reads a dataset's fields without decoding. A context manager; not thread-safe.

    left_out: for each field that cannot be read directly, such as one of variable length or a member of a compound,
    the reason.
    """

    def __init__(self, dataset: Dataset, *, indices: NDArray[np.int64]) -> None:
        """Opens the shards that hold the samples `indices`: all samples that will be read, int64, shape (n,).

        Raises DataError if a shard cannot be opened.
        """
        self._stack = ExitStack()
        self._manifest = dataset.manifest
        self.left_out: dict[str, str] = {}
        self._starts = np.cumsum([0, *(shard.samples for shard in self._manifest.shards)], dtype=np.int64)
        self._fields: dict[int, list[_Mapped | _Chunked]] = {}
        try:
            for number in np.unique(self._shard_of(indices)):
                rows = indices[self._shard_of(indices) == number] - self._starts[number]
                self._fields[int(number)] = self._open(dataset.directory, int(number), rows=rows)
        except BaseException:
            self.close()
            raise

    def _shard_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, indices, side="right") - 1

    def read(self, indices: NDArray[np.int64]) -> int:
        """Reads the samples `indices` (int64, shape (n,)), discards them, and returns the number of bytes read."""
        shard_of = self._shard_of(indices)
        touched = np.unique(shard_of)
        num_bytes = 0
        for number in touched:
            rows = (indices if len(touched) == 1 else indices[shard_of == number]) - self._starts[number]
            num_bytes += sum(field.read(rows) for field in self._fields[int(number)])
        return num_bytes

    def close(self) -> None:
        self._fields.clear()
        self._stack.close()

    def __enter__(self) -> RawReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, directory: Path, number: int, *, rows: NDArray[np.int64]) -> list[_Mapped | _Chunked]:
        entry = self._manifest.shards[number]
        path = directory / entry.file
        try:
            found = []
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            closing = ExitStack()
            closing.callback(os.close, descriptor)
            for name, stored in entry.fields.items():
                field = self._open_field(path, name, stored, number=number, descriptor=descriptor, rows=rows)
                if field is not None:
                    found.append(field)
            if any(isinstance(field, _Chunked) for field in found):
                self._stack.push(closing)
            else:
                closing.close()
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"shard {path} cannot be opened for raw reading: {error}") from error
        return found

    def _open_field(
        self,
        path: Path,
        name: str,
        stored: StoredField,
        *,
        number: int,
        descriptor: int,
        rows: NDArray[np.int64],
    ) -> _Mapped | _Chunked | None:
        import h5py

        spec = self._manifest.fields[name]
        listed = self._manifest.tokens is not None and self._manifest.tokens.boundaries == "split"
        with h5py.File(path, "r", locking=False) as file:
            dataset = file[stored.dataset]
            if dataset.dtype.kind not in "biuf" or spec.kind != "array" or stored.member is not None:
                self.left_out[name] = "its samples have no fixed size in the file"
                return None
            if listed:
                self.left_out[name] = "its token windows are listed one by one, not evenly spaced"
                return None
            offset = dataset.id.get_offset()
            if offset is not None:
                return _Mapped(rows=_rows_of(path, dataset, offset, stored, self._manifest, number=number))
            if dataset.chunks is None or not dataset.shape:
                self.left_out[name] = "it is neither contiguous nor chunked"
                return None
            return _chunked(dataset, stored, self._manifest, descriptor=descriptor, rows=rows)


def _rows_of(
    path: Path, dataset: Any, offset: int, stored: StoredField, manifest: Manifest, *, number: int
) -> NDArray[Any]:
    """Returns a memory map of the field's samples, shape (samples, *sample_shape)."""
    stream: NDArray[Any] = np.memmap(path, mode="r", dtype=dataset.dtype, offset=offset, shape=dataset.shape)
    if stored.whole:
        return stream[np.newaxis]
    stream = stream[stored.first_row :]
    tokens = manifest.tokens
    if tokens is not None:
        return np.lib.stride_tricks.sliding_window_view(stream, tokens.window + 1)[:: tokens.stride]
    return stream[: manifest.shards[number].samples]


def _chunked(
    dataset: Any, stored: StoredField, manifest: Manifest, *, descriptor: int, rows: NDArray[np.int64]
) -> _Chunked:
    tokens = manifest.tokens
    chunk_rows = dataset.chunks[0]

    def rows_of(samples: NDArray[np.int64]) -> NDArray[np.int64]:
        if stored.whole:
            return np.arange(dataset.shape[0], dtype=np.int64)
        if tokens is None:
            return samples + stored.first_row
        spread = np.arange(tokens.window + 1, dtype=np.int64)
        return (samples[:, None] * tokens.stride + spread + stored.first_row).reshape(-1)

    places: dict[int, list[tuple[int, int]]] = {}
    along = [range(0, size, step) for size, step in zip(dataset.shape[1:], dataset.chunks[1:], strict=True)]
    for chunk_row in np.unique(rows_of(rows) // chunk_rows):
        places[int(chunk_row)] = []
        for rest in np.ndindex(*(len(one) for one in along)):
            corner = (
                int(chunk_row) * chunk_rows,
                *(one[place] for one, place in zip(along, rest, strict=True)),
            )
            info = dataset.id.get_chunk_info_by_coord(corner)
            if info.byte_offset is not None and info.size:
                places[int(chunk_row)].append((info.byte_offset, info.size))
    return _Chunked(descriptor=descriptor, chunk_rows=chunk_rows, rows_of=rows_of, places=places)
