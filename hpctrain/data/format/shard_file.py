"""Writes one shard: an HDF5 file with a dataset a field, contiguous or compressed, hashed from memory."""

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

RECORD_SUFFIX = ".json"
_READ_BYTES = 1 << 20


def shard_name(index: int, *, part: int | None = None) -> str:
    """File name of shard number `index`, of the part of a source that is packed in parts."""
    return f"{SHARD_PREFIX}{'' if part is None else f'{part:05d}-'}{index:05d}.h5"


def shard_number(name: str) -> tuple[int, ...]:
    """What shards are sorted by: the numbers in a file name."""
    return tuple(map(int, re.findall(r"\d+", name.removesuffix(".h5"))))


def record_name(file: str) -> str:
    """Name of the record that stands beside the finished shard `file` until the manifest is written."""
    return f".{file.removesuffix('.h5')}{RECORD_SUFFIX}"


def is_shard_name(name: str) -> bool:
    """Whether a file of that name was made by packing, finished or not."""
    return (name.startswith(SHARD_PREFIX) and name.endswith(".h5")) or (
        name.startswith(f".{SHARD_PREFIX}") and name.endswith((PARTIAL_SUFFIX, RECORD_SUFFIX))
    )


def block_ranges(num_bytes: int, *, block_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each hashed block of a dataset of `num_bytes`."""
    for start in range(0, num_bytes, block_bytes):
        yield start, min(start + block_bytes, num_bytes)


def write_fully(descriptor: int, data: memoryview, *, offset: int) -> None:
    """pwrite all of `data`: a single call may write less, or nothing more than 2 GiB at once."""
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written


def read_fully(descriptor: int, num_bytes: int, *, offset: int) -> bytes:
    """pread `num_bytes`; fewer come back only at the end of the file."""
    parts = []
    while num_bytes:
        part = os.pread(descriptor, num_bytes, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        num_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def structure_hash(descriptor: int, *, file_bytes: int, extents: Iterable[tuple[int, int]]) -> str:
    """xxh3_64 of the bytes outside the datasets' extents (offset, num_bytes): HDF5's own headers."""
    digest = xxhash.xxh3_64()
    position = 0
    for offset, num_bytes in [*sorted(extents), (file_bytes, 0)]:
        while position < offset:
            part = read_fully(descriptor, min(_READ_BYTES, offset - position), offset=position)
            if not part:
                break
            digest.update(part)
            position += len(part)
        position = max(position, offset + num_bytes)
    return digest.hexdigest()


def extents_of(fields: Mapping[str, StoredField]) -> list[tuple[int, int]]:
    """(offset, num_bytes) of the fields that have one place in the file."""
    return [(field.offset, field.num_bytes) for field in fields.values() if field.offset is not None]


def write_shard(
    directory: Path,
    *,
    file: str,
    samples: int,
    arrays: Mapping[str, NDArray[Any]],
    block_bytes: int,
    beside: Mapping[str, NDArray[Any]] | None = None,
    compression: ShardCompression | None = None,
) -> ShardEntry:
    """Write the shard `file` of the dataset in `directory`, and return its entry for the manifest.

    arrays: dataset name -> array as stored; dtypes as in the manifest, any byte order. beside: datasets that
    are no fields; the structure hash covers them. compression: of fields with samples that are large enough.
    The structure hash covers compressed chunks too: in such a file nothing can change unseen.
    Written under a temporary name, synced, then renamed. Raises DataError when the file system refuses.
    """
    path = directory / file
    partial = directory / f".{file}{PARTIAL_SUFFIX}"
    stored = {name: _little_endian(array) for name, array in arrays.items()}
    others = {name: _little_endian(array) for name, array in (beside or {}).items()}
    chunked = {} if compression is None else _compressed(stored, samples=samples, compression=compression)
    placed = {name: a for name, a in {**stored, **others}.items() if name not in chunked}
    try:
        offsets = create(
            partial, datasets={name: (a.shape, a.dtype) for name, a in placed.items()}, chunked=chunked
        )
        descriptor = os.open(partial, os.O_RDWR)
        try:
            for name, array in others.items():
                if name in offsets:  # one that holds nothing has no place
                    write_fully(descriptor, _bytes_of(array), offset=offsets[name])
            fields = {}
            for name, array in stored.items():
                data = _bytes_of(array)
                hashes = []
                for start, stop in block_ranges(len(data), block_bytes=block_bytes):
                    block = data[start:stop]
                    hashes.append(xxhash.xxh3_64_hexdigest(block))
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
    """Whether a shard that was written here is there and whole: size, and every byte by its hash."""
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
                data = read_fully(descriptor, stop - start, offset=field.offset + start)
                if xxhash.xxh3_64_hexdigest(data) != expected:
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
    """The fields that are worth it. Rows a chunk: those of `chunk_samples` samples (tokens: a stride each)."""
    return {
        name: compress(
            array,
            rows=max(1, compression.chunk_samples * (len(array) // samples)),
            compression=compression,
        )
        for name, array in arrays.items()
        if array.nbytes // samples >= SMALLEST_SAMPLE_BYTES
    }
