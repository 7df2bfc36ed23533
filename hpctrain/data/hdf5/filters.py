"""Decodes and encodes chunks like the filters of HDF5, but without HDF5, whose lock would serialise threads.

To add a codec, add an entry to `FILTERS`, and a member to `ChunkCodec` if shards can be written with it.

Sources: the HDF5 file format specification, version 3 (shuffle, Fletcher-32); RFC 1950 (deflate). Zstandard and Blosc
are decoded by numcodecs. Shuffle and Fletcher-32 are implemented here, since numcodecs is optional.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.hdf5.layout import Filter
from hpctrain.errors import DataError, UsageError

# Fields with smaller samples, such as labels, are not compressed: the chunk index would be larger than the data.
SMALLEST_SAMPLE_BYTES = 64
# Registered numbers: https://github.com/HDFGroup/hdf5_plugins/blob/master/docs/RegisteredFilterPlugins.md
DEFLATE, SHUFFLE, FLETCHER32, BLOSC, ZSTD = 1, 2, 3, 32001, 32015
# https://github.com/Blosc/hdf5-blosc: the last of seven parameters is the compressor, as numbered in blosc.h
_BLOSC_CODEC_VALUE = 6
_BLOSC_CODECS = ("blosclz", "lz4", "lz4hc", "snappy", "zlib", "zstd")
_FLETCHER_BYTES = 4
_FLETCHER_WORDS = 1 << 16
# shape (_FLETCHER_WORDS,): weight of each word of a block in the second sum
_FLETCHER_WEIGHTS = np.arange(_FLETCHER_WORDS, 0, -1, dtype=np.uint64)
_LARGEST_CHUNK_BYTES = (1 << 32) - 1
_MAX_THREADS = 8

Bytes = bytes | memoryview


class ChunkCodec(str, Enum):
    """Compression of chunks.

    GZIP: Every HDF5 library can read the chunks.
    ZSTD: Compresses better than GZIP, and several times faster. Needs hdf5plugin.
    """

    GZIP = "gzip"
    ZSTD = "zstd"


def codec_names() -> str:
    """Returns the names of all codecs, for messages and help texts."""
    *most, last = (codec.value for codec in ChunkCodec)
    return f"{', '.join(most)} or {last}"


@dataclass(frozen=True, kw_only=True)
class ShardCodec:
    """How shards are compressed with a filter.

    Attributes:
        codec: The name by which users choose the compression.
        encoder: Function that takes a compression level and returns another function, which encodes a chunk. Raises
            ImportError if a library is missing.
        h5py_options: Function that takes a compression level and returns the arguments of h5py's `create_dataset`.
    """

    codec: ChunkCodec
    encoder: Callable[[int], Callable[[Any], bytes]]
    h5py_options: Callable[[int], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class FilterSupport:
    """Functions that implement an HDF5 filter without HDF5.

    Attributes:
        decode: Function that undoes the filter. It takes the data, the parameters of the filter, and the size of the
            decoded chunk in bytes, or None if the size is unknown.
        is_installed: Function that takes the parameters of the filter, and returns True if the libraries that `decode`
            needs are installed.
        shards: How shards are compressed with the filter; None: shards cannot be compressed with it.
    """

    decode: Callable[[Bytes, Sequence[int], int | None], Bytes]
    is_installed: Callable[[Sequence[int]], bool] = lambda values: True
    shards: ShardCodec | None = None


def can_undo(filters: Sequence[Filter]) -> bool:
    """Returns True if `undo` supports all of `filters`, and the libraries that these filters need are installed."""
    return all(each.code in FILTERS and FILTERS[each.code].is_installed(each.values) for each in filters)


def undo(data: Bytes, *, filters: Sequence[Filter], mask: int, num_bytes: int | None) -> Bytes:
    """Decodes a stored chunk, by undoing its filters in reverse order.

    Bit i of `mask` is set if filter i was not applied to the chunk. `num_bytes` is the size that the result must have,
    or None if any size is right. Raises DataError if the chunk cannot be decoded.
    """
    for number in reversed(range(len(filters))):
        if mask & (1 << number):
            continue
        code, values = filters[number]
        try:
            data = FILTERS[code].decode(data, values, num_bytes)
        except DataError:
            raise
        except Exception as error:  # the libraries raise different errors
            raise DataError(f"the chunk cannot be decoded with HDF5 filter {code}: {error}") from error
    if num_bytes is not None and len(data) != num_bytes:
        raise DataError(f"the chunk has {len(data)} bytes after decoding, but {num_bytes} are expected")
    return data


def _inflate(data: Bytes, values: Sequence[int], num_bytes: int | None) -> bytes:
    # A buffer of exactly this size saves a copy of the result.
    return zlib.decompress(data, bufsize=zlib.DEF_BUF_SIZE if num_bytes is None else num_bytes)


def _deflate(level: int) -> Callable[[Any], bytes]:
    return lambda data: zlib.compress(data, level)


def _has_zstd(values: Sequence[int]) -> bool:
    try:
        import numcodecs.zstd  # noqa: F401
    except ImportError:
        return False
    return True


def _from_zstd(data: Bytes, values: Sequence[int], num_bytes: int | None) -> bytes:
    from numcodecs import zstd

    return bytes(zstd.decompress(data))


def _to_zstd(level: int) -> Callable[[Any], bytes]:
    import hdf5plugin  # noqa: F401  # registers the filter, which HDF5 needs to create the dataset
    from numcodecs.zstd import Zstd

    codec = Zstd(level=level)
    return lambda data: bytes(codec.encode(data))


def _has_blosc(values: Sequence[int]) -> bool:
    try:
        from numcodecs import blosc
    except ImportError:
        return False
    number = values[_BLOSC_CODEC_VALUE] if len(values) > _BLOSC_CODEC_VALUE else 0
    return number < len(_BLOSC_CODECS) and _BLOSC_CODECS[number] in blosc.list_compressors()


def _from_blosc(data: Bytes, values: Sequence[int], num_bytes: int | None) -> bytes:
    from numcodecs import blosc

    return bytes(blosc.decompress(data))


def _unshuffle(data: Bytes, values: Sequence[int], num_bytes: int | None) -> Bytes:
    """Undoes HDF5's shuffle filter, which stores the first bytes of all elements, then all second bytes, and so on.

    The first of `values`, the parameters of the filter, is the size of an element in bytes.
    """
    itemsize = values[0]
    count = len(data) // itemsize
    if itemsize <= 1 or count <= 1:
        return data
    source = np.frombuffer(data, dtype=np.uint8)
    result = np.empty(len(data), dtype=np.uint8)
    elements = result[: count * itemsize].reshape(count, itemsize)
    for byte in range(itemsize):
        elements[:, byte] = source[byte * count : (byte + 1) * count]
    result[count * itemsize :] = source[count * itemsize :]
    return result.data


def _without_checksum(data: Bytes, values: Sequence[int], num_bytes: int | None) -> Bytes:
    view = memoryview(data)
    content, stored = view[:-_FLETCHER_BYTES], int.from_bytes(view[-_FLETCHER_BYTES:], "little")
    found = fletcher32(content)
    # HDF5 before 1.6.3 swapped the bytes of each half; newer versions still accept that.
    swapped = ((found & 0xFF00FF00) >> 8) | ((found & 0x00FF00FF) << 8)
    if stored not in (found, swapped):
        raise DataError(
            f"the Fletcher-32 checksum of the chunk is {found:08x}, but {stored:08x} is stored in the file"
        )
    return content


def fletcher32(data: Bytes) -> int:
    """Returns the Fletcher-32 checksum of HDF5: two sums modulo 65535 of big-endian 16-bit words.

    If the number of bytes is odd, the last byte is the high byte of the last word.
    """
    num_words = len(data) // 2
    words: NDArray[np.uint16] = np.frombuffer(data, dtype=">u2", count=num_words)
    first = second = 0
    for start in range(0, num_words, _FLETCHER_WORDS):
        part = words[start : start + _FLETCHER_WORDS].astype(np.uint64)
        second += first * len(part) + int(np.dot(_FLETCHER_WEIGHTS[-len(part) :], part))
        first += int(part.sum())
    if len(data) % 2:
        first += data[-1] << 8
        second += first
    return _fold(second) << 16 | _fold(first)


def _fold(value: int) -> int:
    """Returns `value` modulo 65535, but 65535 instead of 0 unless `value` is 0. HDF5 computes Fletcher-32 so."""
    return value % 65535 or (65535 if value else 0)


FILTERS: dict[int, FilterSupport] = {
    SHUFFLE: FilterSupport(decode=_unshuffle),
    FLETCHER32: FilterSupport(decode=_without_checksum),
    BLOSC: FilterSupport(decode=_from_blosc, is_installed=_has_blosc),
    DEFLATE: FilterSupport(
        decode=_inflate,
        shards=ShardCodec(
            codec=ChunkCodec.GZIP,
            encoder=_deflate,
            h5py_options=lambda level: {"compression": "gzip", "compression_opts": level},
        ),
    ),
    ZSTD: FilterSupport(
        decode=_from_zstd,
        is_installed=_has_zstd,
        shards=ShardCodec(
            codec=ChunkCodec.ZSTD,
            encoder=_to_zstd,
            h5py_options=lambda level: {"compression": ZSTD, "compression_opts": (level,)},
        ),
    ),
}
_SHARD_CODECS = {each.shards.codec: each.shards for each in FILTERS.values() if each.shards is not None}


@dataclass(frozen=True, kw_only=True)
class ShardCompression:
    """How shards are compressed: in chunks of `chunk_samples` samples, with a codec at a compression level.

    If elements have more than one byte, the shuffle filter is applied before the codec. Raises UsageError if
    `chunk_samples` is below 1, DataError if the codec is not installed.
    """

    codec: ChunkCodec
    chunk_samples: int
    level: int = 4

    def __post_init__(self) -> None:
        if self.chunk_samples < 1:
            raise UsageError(f"--chunk-samples {self.chunk_samples}: a chunk must hold at least one sample")
        self.encoder()

    def encoder(self) -> Callable[[Any], bytes]:
        """Returns the function that encodes a chunk. Raises DataError if the codec is not installed."""
        try:
            return _SHARD_CODECS[self.codec].encoder(self.level)
        except ImportError as error:
            raise DataError(
                f"{self.codec.value} needs hdf5plugin and numcodecs ({error}): pip install hpctrain[formats]"
            ) from error

    @property
    def h5py_options(self) -> dict[str, Any]:
        """Arguments of h5py's `create_dataset` that select the codec and the level."""
        return _SHARD_CODECS[self.codec].h5py_options(self.level)

    def as_json(self) -> dict[str, str | int]:
        return {"codec": self.codec.value, "chunk_samples": self.chunk_samples, "level": self.level}


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """An HDF5 dataset as compressed chunks: shape and dtype of the dataset, and its chunks in the order of rows.

    `filters` contains the arguments of h5py's `create_dataset` that select chunks and filters.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    filters: dict[str, Any]
    encoded: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.encoded))


def compress(array: NDArray[Any], *, rows: int, compression: ShardCompression) -> Chunks:
    """Encodes an array in chunks of `rows` rows, or in one chunk if the array has fewer rows.

    `array` must be C-contiguous. Raises UsageError if a chunk would exceed HDF5's limit of 4 GiB.
    """
    rows = min(rows, len(array))
    chunk = (rows, *array.shape[1:])
    chunk_bytes = int(np.prod(chunk, dtype=np.int64)) * array.dtype.itemsize
    if chunk_bytes > _LARGEST_CHUNK_BYTES:
        raise UsageError(
            f"a chunk of {rows} rows has {chunk_bytes} bytes, HDF5's limit is 4 GiB: choose fewer"
        )
    shuffled = array.dtype.itemsize > 1
    filters = {"chunks": chunk, "shuffle": shuffled, **compression.h5py_options}
    encode = compression.encoder()

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
