"""Writes one shard: an HDF5 file with one dataset per field, contiguous or compressed, hashed from memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data.format.manifest import PARTIAL_SUFFIX, SHARD_PREFIX, ShardEntry, StoredField
from hpctrain.data.hdf5.create import create
from hpctrain.data.hdf5.encode import SMALLEST_SAMPLE_BYTES, Chunks, ShardCompression, compress
from hpctrain.errors import DataError
from hpctrain.storage import hash_of, read_up_to, write_fully

RECORD_SUFFIX = ".json"
_READ_BYTES = 1 << 20


def shard_name(index: int, *, part: int | None = None) -> str:
    """Returns the file name of shard number `index`. part: part of the source, if it is packed in parts."""
    return f"{SHARD_PREFIX}{'' if part is None else f'{part:05d}-'}{index:05d}.h5"


def shard_number(name: str) -> tuple[int, ...]:
    """Returns the numbers in a file name, by which shards are sorted."""
    return tuple(map(int, re.findall(r"\d+", name.removesuffix(".h5"))))


def record_name(file: str) -> str:
    """Returns the name of the record of the finished shard `file`, which exists until the manifest is written."""
    return f".{file.removesuffix('.h5')}{RECORD_SUFFIX}"


def is_shard_name(name: str) -> bool:
    """True if `name` is that of a shard, a partial shard or a record of a shard."""
    return (name.startswith(SHARD_PREFIX) and name.endswith(".h5")) or (
        name.startswith(f".{SHARD_PREFIX}") and name.endswith((PARTIAL_SUFFIX, RECORD_SUFFIX))
    )


def block_ranges(num_bytes: int, *, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) in bytes of each hashed block of a dataset of `num_bytes`."""
    for start in range(0, num_bytes, block_bytes):
        yield start, min(start + block_bytes, num_bytes)


def read_bytes(descriptor: int, num_bytes: int, *, offset: int) -> bytearray:
    """Reads `num_bytes` with pread. Returns fewer only at the end of the file."""
    data = bytearray(num_bytes)
    del data[read_up_to(descriptor, memoryview(data), offset=offset) :]
    return data


def structure_hash(descriptor: int, *, file_bytes: int, extents: Iterable[tuple[int, int]]) -> str:
    """Returns xxh3_64 of the bytes outside the datasets' extents (offset, num_bytes), such as HDF5 headers."""
    digest = xxhash.xxh3_64()
    position = 0
    for offset, num_bytes in [*sorted(extents), (file_bytes, 0)]:
        while position < offset:
            part = read_bytes(descriptor, min(_READ_BYTES, offset - position), offset=position)
            if not part:
                break
            digest.update(part)
            position += len(part)
        position = max(position, offset + num_bytes)
    return digest.hexdigest()


def extents_of(fields: Mapping[str, StoredField]) -> list[tuple[int, int]]:
    """Returns (offset, num_bytes) of the fields that are contiguous in the file."""
    return [(field.offset, field.num_bytes) for field in fields.values() if field.offset is not None]


def write_shard(
    directory: Path,
    *,
    file: str,
    samples: int,
    arrays: Mapping[str, NDArray[Any]],
    block_bytes: int,
    other_datasets: Mapping[str, NDArray[Any]] | None = None,
    compression: ShardCompression | None = None,
) -> ShardEntry:
    """Writes the shard `file` of the dataset in `directory`. Returns its entry for the manifest.

    arrays: field name -> array as stored; dtypes as in the manifest, any byte order. other_datasets: additional
    datasets that are not fields, covered by the structure hash. compression: for fields with large enough samples;
    their chunks are covered by the structure hash too.
    Written under a temporary name, synced, then renamed. Raises DataError after an error of the filesystem.
    """
    path = directory / file
    partial = directory / f".{file}{PARTIAL_SUFFIX}"
    stored = {name: _little_endian(array) for name, array in arrays.items()}
    others = {name: _little_endian(array) for name, array in (other_datasets or {}).items()}
    chunked = {} if compression is None else _compressed(stored, samples=samples, compression=compression)
    placed = {name: a for name, a in {**stored, **others}.items() if name not in chunked}
    try:
        offsets = create(
            partial, datasets={name: (a.shape, a.dtype) for name, a in placed.items()}, chunked=chunked
        )
        descriptor = os.open(partial, os.O_RDWR)
        try:
            for name, array in others.items():
                if name in offsets:  # an empty dataset has no offset
                    write_fully(descriptor, _bytes_of(array), offset=offsets[name])
            fields = {}
            for name, array in stored.items():
                data = _bytes_of(array)
                hashes = []
                for start, stop in block_ranges(len(data), block_bytes=block_bytes):
                    block = data[start:stop]
                    hashes.append(hash_of(block))
                    if name in offsets:
                        write_fully(descriptor, block, offset=offsets[name] + start)
                fields[name] = StoredField(
                    dataset=name, offset=offsets.get(name), num_bytes=len(data), hashes=tuple(hashes)
                )
            file_bytes = os.fstat(descriptor).st_size
            structure = structure_hash(descriptor, file_bytes=file_bytes, extents=extents_of(fields))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"shard {path} cannot be written: {error}") from error
    return ShardEntry(
        file=path.name, samples=samples, file_bytes=file_bytes, structure_hash=structure, fields=fields
    )


def is_as_written(directory: Path, *, entry: ShardEntry, block_bytes: int) -> bool:
    """True if the shard exists, and its size and all its hashes match `entry`. Reads the whole file."""
    try:
        descriptor = os.open(directory / entry.file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(descriptor).st_size != entry.file_bytes:
            return False
        found = structure_hash(descriptor, file_bytes=entry.file_bytes, extents=extents_of(entry.fields))
        if found != entry.structure_hash:
            return False
        for field in entry.fields.values():
            if field.offset is None:
                continue
            ranges = block_ranges(field.num_bytes, block_bytes=block_bytes)
            for (start, stop), expected in zip(ranges, field.hashes, strict=True):
                data = read_bytes(descriptor, stop - start, offset=field.offset + start)
                if hash_of(data) != expected:
                    return False
        return True
    finally:
        os.close(descriptor)


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _compressed(
    arrays: Mapping[str, NDArray[Any]], *, samples: int, compression: ShardCompression
) -> dict[str, Chunks]:
    """Compresses the fields with large enough samples. Returns field name -> chunks.

    A chunk has the rows of `chunk_samples` samples; for tokens, about a stride for each sample.
    """
    return {
        name: compress(
            array,
            rows=max(1, compression.chunk_samples * (len(array) // samples)),
            compression=compression,
        )
        for name, array in arrays.items()
        if array.nbytes // samples >= SMALLEST_SAMPLE_BYTES
    }
