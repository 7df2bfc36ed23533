"""Encodes chunks in the formats of HDF5's filters, in threads, without HDF5's lock."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError, UsageError

# Fields with smaller samples, such as labels, are not compressed: the chunk index would be larger than the data.
SMALLEST_SAMPLE_BYTES = 64
_LARGEST_CHUNK_BYTES = (1 << 32) - 1
_ZSTD_FILTER = 32015  # its registered number, https://github.com/HDFGroup/hdf5_plugins
_MAX_THREADS = 8


class ChunkCodec(str, Enum):
    """gzip: every HDF5 can read it. zstd: smaller and several times faster; reading needs hdf5plugin."""

    GZIP = "gzip"
    ZSTD = "zstd"


@dataclass(frozen=True, kw_only=True)
class ShardCompression:
    """Compression of shards: chunks of `chunk_samples` samples; elements of more than one byte are shuffled first.

    Raises UsageError if `chunk_samples` is below 1, DataError if the codec is not installed.
    """

    codec: ChunkCodec
    chunk_samples: int
    level: int = 4

    def __post_init__(self) -> None:
        if self.chunk_samples < 1:
            raise UsageError(f"--chunk-samples {self.chunk_samples}: a chunk must hold at least one sample")
        if self.codec is ChunkCodec.ZSTD:
            _encoder_of_zstd(self.level)

    def as_json(self) -> dict[str, str | int]:
        return {"codec": self.codec.value, "chunk_samples": self.chunk_samples, "level": self.level}


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A compressed dataset: chunk shape, arguments of h5py's `create_dataset`, and the chunks in order of rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    filters: dict[str, Any]
    encoded: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.encoded))


def compress(array: NDArray[Any], *, rows: int, compression: ShardCompression) -> Chunks:
    """Encodes `array`, C-contiguous, in chunks of `rows` rows (or all rows if it has fewer).

    Raises UsageError if a chunk would exceed HDF5's limit of 4 GiB.
    """
    rows = min(rows, len(array))
    chunk = (rows, *array.shape[1:])
    chunk_bytes = int(np.prod(chunk, dtype=np.int64)) * array.dtype.itemsize
    if chunk_bytes > _LARGEST_CHUNK_BYTES:
        raise UsageError(
            f"a chunk of {rows} rows has {chunk_bytes} bytes, HDF5's limit is 4 GiB: choose fewer"
        )
    shuffled = array.dtype.itemsize > 1
    filters: dict[str, Any] = {"chunks": chunk, "shuffle": shuffled}
    encode: Callable[[Any], bytes]
    if compression.codec is ChunkCodec.GZIP:
        filters |= {"compression": "gzip", "compression_opts": compression.level}

        def encode(data: Any) -> bytes:
            return zlib.compress(data, compression.level)
    else:
        filters |= {"compression": _ZSTD_FILTER, "compression_opts": (compression.level,)}
        encode = _encoder_of_zstd(compression.level)

    def encode_chunk(start: int) -> bytes:
        part = array[start : start + rows]
        if len(part) < rows:  # HDF5 stores chunks at the border in full size
            part = np.concatenate([part, np.zeros((rows - len(part), *array.shape[1:]), array.dtype)])
        data = part.reshape(-1).view(np.uint8)
        if shuffled:
            data = np.ascontiguousarray(data.reshape(-1, array.dtype.itemsize).T)
        return encode(data)

    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="hpctrain-compress") as pool:
        encoded = tuple(pool.map(encode_chunk, range(0, len(array), rows)))
    return Chunks(shape=array.shape, dtype=array.dtype, chunk=chunk, filters=filters, encoded=encoded)


def _encoder_of_zstd(level: int) -> Callable[[Any], bytes]:
    try:
        import hdf5plugin  # noqa: F401  # registers the filter, which HDF5 needs to create the dataset
        from numcodecs.zstd import Zstd
    except ImportError as error:
        raise DataError(
            f"zstd needs hdf5plugin and numcodecs ({error}): pip install hpctrain[formats]"
        ) from error
    codec = Zstd(level=level)
    return lambda data: bytes(codec.encode(data))
