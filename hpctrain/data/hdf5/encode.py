"""Compressed chunks as HDF5's own filters make them, encoded in threads outside HDF5's lock."""

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

# A sample of fewer bytes (a label) is not compressed: the index of its chunks would be larger than it.
SMALLEST_SAMPLE_BYTES = 64
_LARGEST_CHUNK_BYTES = (1 << 32) - 1
_ZSTD_FILTER = 32015  # its registered number, https://github.com/HDFGroup/hdf5_plugins
_MAX_THREADS = 8


class ChunkCodec(str, Enum):
    """gzip: every HDF5 reads it. zstd: smaller and several times faster, needs hdf5plugin to read."""

    GZIP = "gzip"
    ZSTD = "zstd"


@dataclass(frozen=True, kw_only=True)
class ShardCompression:
    """How shards are compressed: chunks of `chunk_samples` samples, bytes shuffled first where that helps."""

    codec: ChunkCodec
    chunk_samples: int
    level: int = 4

    def __post_init__(self) -> None:
        if self.chunk_samples < 1:
            raise UsageError(f"--chunk-samples {self.chunk_samples}: a chunk holds at least one sample")
        if self.codec is ChunkCodec.ZSTD:
            _encoder_of_zstd(self.level)

    def as_json(self) -> dict[str, str | int]:
        return {"codec": self.codec.value, "chunk_samples": self.chunk_samples, "level": self.level}


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A compressed dataset: chunk shape, what HDF5 is told, and the chunks along the first dimension."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    filters: dict[str, Any]
    encoded: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.encoded))


def compress(array: NDArray[Any], *, rows: int, compression: ShardCompression) -> Chunks:
    """Encode `array`, C-contiguous, in chunks of `rows` rows (fewer if it has fewer).

    Raises UsageError for a chunk above HDF5's limit of 4 GiB.
    """
    rows = min(rows, len(array))
    chunk = (rows, *array.shape[1:])
    chunk_bytes = int(np.prod(chunk, dtype=np.int64)) * array.dtype.itemsize
    if chunk_bytes > _LARGEST_CHUNK_BYTES:
        raise UsageError(f"a chunk of {rows} rows has {chunk_bytes} bytes, HDF5 takes 4 GiB: choose fewer")
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
        if len(part) < rows:  # every chunk is stored whole
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
        import hdf5plugin  # noqa: F401  # registers the filter: HDF5 makes no dataset with one it lacks
        from numcodecs.zstd import Zstd
    except ImportError as error:
        raise DataError(
            f"zstd needs hdf5plugin and numcodecs ({error}): pip install hpctrain[formats]"
        ) from error
    codec = Zstd(level=level)
    return lambda data: bytes(codec.encode(data))
