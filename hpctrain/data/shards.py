"""Writes one shard: an HDF5 file with a contiguous dataset a field, hashed from the memory written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data import hdf5
from hpctrain.data.manifest import PARTIAL_SUFFIX, SHARD_PREFIX, ShardEntry, StoredField
from hpctrain.errors import DataError

_READ_BYTES = 1 << 20


def shard_name(index: int) -> str:
    """File name of shard number `index`."""
    return f"{SHARD_PREFIX}{index:05d}.h5"


def is_shard_name(name: str) -> bool:
    """Whether a file of that name was made by packing, finished or not."""
    return (name.startswith(SHARD_PREFIX) and name.endswith(".h5")) or (
        name.startswith(f".{SHARD_PREFIX}") and name.endswith(PARTIAL_SUFFIX)
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


def write_shard(
    directory: Path,
    *,
    index: int,
    samples: int,
    arrays: Mapping[str, NDArray[Any]],
    block_bytes: int,
) -> ShardEntry:
    """Write shard `index` of the dataset in `directory`, and return its entry for the manifest.

    arrays: dataset name -> array as stored; dtypes as in the manifest, any byte order.
    Written under a temporary name, synced, then renamed. Raises DataError when the file system refuses.
    """
    path = directory / shard_name(index)
    partial = directory / f".{path.name}{PARTIAL_SUFFIX}"
    stored = {name: np.ascontiguousarray(a, dtype=a.dtype.newbyteorder("<")) for name, a in arrays.items()}
    try:
        offsets = hdf5.create(partial, datasets={name: (a.shape, a.dtype) for name, a in stored.items()})
        descriptor = os.open(partial, os.O_RDWR)
        try:
            fields = {}
            for name, array in stored.items():
                data = array.reshape(-1).view(np.uint8).data
                hashes = []
                for start, stop in block_ranges(len(data), block_bytes=block_bytes):
                    block = data[start:stop]
                    hashes.append(xxhash.xxh3_64_hexdigest(block))
                    write_fully(descriptor, block, offset=offsets[name] + start)
                fields[name] = StoredField(
                    dataset=name, offset=offsets[name], num_bytes=len(data), hashes=tuple(hashes)
                )
            file_bytes = os.fstat(descriptor).st_size
            extents = [(field.offset, field.num_bytes) for field in fields.values()]
            structure = structure_hash(descriptor, file_bytes=file_bytes, extents=extents)
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
