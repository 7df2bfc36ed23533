"""Reads the locations of all chunks of an HDF5 dataset at once, without the HDF5 library.

This is faster than HDF5: HDF5 1.10 searches all chunks for each location. Source: HDF5 file format specification,
version 3: III.A.1 (version 1 B-trees), IV.A.1 (object headers), IV.A.2.i (data layout message). HDF5 writes version 1
B-trees unless the file was created with `libver="latest"`. Only this kind of index is read here; the five newer kinds
are read by HDF5.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.hdf5.layout import ChunkPlace, DatasetLayout

# 16 bytes each: 1 MiB for a dataset of an open file.
MAX_CHUNKS = 1 << 16
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LAYOUT_MESSAGE, _CONTINUATION_MESSAGE, _SHARED_FLAG = 0x08, 0x10, 0x02
_CHUNKED = 2
_EXTENSIBLE_ARRAY, _LAST_KNOWN_INDEX = 4, 5
_PARTIAL_CHUNKS_ARE_UNFILTERED = 0x01
_NOWHERE = (1 << 64) - 1
_MAX_HEADER_BYTES, _MAX_HEADER_BLOCKS = 1 << 20, 64
_MAX_DEPTH = 8
_TREE_HEADER_BYTES = 24


class _UnknownError(Exception):
    """Raised if the file has a kind of index that is not supported here, or if its index is damaged."""


class _Block(NamedTuple):
    """Byte range of a file. `offset` is relative to the end of the user block."""

    offset: int
    num_bytes: int


class ChunkAccess(Enum):
    """What the HDF5 library returns correctly about the chunks of a dataset, if only it can find them.

    Used for a chunk index of a kind that hpctrain cannot read itself.

    PLACES: The location of each chunk in the file.
    STORED: The stored bytes of each chunk, but not its location.
    VALUES: Only the elements of each chunk.
    """

    PLACES = "places"
    STORED = "stored"
    VALUES = "values"


@final
class ChunkIndex:
    """Locations of the chunks of a dataset, in row-major order. The offset of a chunk that was never written is -1."""

    def __init__(self, places: NDArray[np.int64], *, counts: tuple[int, ...]) -> None:
        """`places` contains for each chunk its file offset, its size in bytes and its filter mask.

        The array is int64, shape (number of chunks, 3). `counts` is the number of chunks in each dimension.
        """
        self.offsets = np.ascontiguousarray(places[:, 0]).data
        self.sizes = places[:, 1].astype(np.uint32).data
        self.masks = places[:, 2].astype(np.uint32).data
        self._strides = [math.prod(counts[dim + 1 :]) for dim in range(len(counts))]

    def place(self, numbers: tuple[int, ...]) -> ChunkPlace | None:
        """Returns the location of a chunk, or None if the chunk was never written.

        `numbers` is the index of the chunk in each dimension.
        """
        number = sum(n * stride for n, stride in zip(numbers, self._strides, strict=True))
        if self.offsets[number] < 0:
            return None
        return ChunkPlace(self.offsets[number], self.sizes[number], self.masks[number])


def read_chunk_index(
    descriptor: int, *, header: int, layout: DatasetLayout, base: int = 0
) -> ChunkIndex | None:
    """Returns the chunk index of a dataset, or None if only HDF5 can find the chunks.

    Returns None if the dataset is not chunked, if it has no chunks or more than MAX_CHUNKS chunks, or if its index is
    damaged or of a kind that is not supported. `header` is the offset of the dataset's object header in bytes,
    relative to the end of the user block. `base` is the size of the user block in bytes. Raises OSError if the file
    cannot be read.
    """
    if layout.chunks is None or not 0 < layout.num_chunks <= MAX_CHUNKS:
        return None
    try:
        return _Reader(descriptor, base=base, layout=layout).index(header)
    except (_UnknownError, struct.error, IndexError, ValueError):
        return None


def read_chunk_access(
    descriptor: int, *, header: int, layout: DatasetLayout, base: int, first_is_unlimited: bool
) -> ChunkAccess:
    """Returns which functions of HDF5 return correct results for the chunks of a dataset.

    HDF5 returns wrong results in two cases. First, if the index is an extensible array and the unlimited dimension is
    not the first, HDF5 stores the unlimited dimension as the first. The functions that return locations
    (H5Dget_chunk_info, H5Dget_chunk_info_by_coord and H5Dchunk_iter) do not consider that in HDF5 1.10.8, 1.14.2 and
    2.0.0. Second, chunks at the border may be stored without the filters, and the filter mask does not state that.

    `header` is the offset of the dataset's object header in bytes, relative to the end of the user block. `base` is the
    size of the user block in bytes. `first_is_unlimited` is True if the first dimension may grow without a limit.
    Raises OSError if the file cannot be read.
    """
    if layout.chunks is None:
        return ChunkAccess.VALUES
    try:
        reader = _Reader(descriptor, base=base, layout=layout)
        content, flags = reader.layout_message(header)
    except (_UnknownError, struct.error, IndexError, ValueError):
        return ChunkAccess.VALUES
    if flags & _SHARED_FLAG or len(content) < 5 or content[1] != _CHUNKED:
        return ChunkAccess.VALUES
    if content[0] == 3:
        return ChunkAccess.PLACES
    # Version 4: version, class, flags, number of dimensions, bytes of each, the dimensions, kind of index
    chunk_flags, num_dims, width = content[2:5]
    after = 5 + num_dims * width
    if content[0] != 4 or chunk_flags & _PARTIAL_CHUNKS_ARE_UNFILTERED or len(content) <= after:
        return ChunkAccess.VALUES
    if not 1 <= content[after] <= _LAST_KNOWN_INDEX:
        return ChunkAccess.VALUES
    if content[after] == _EXTENSIBLE_ARRAY and not first_is_unlimited:
        return ChunkAccess.STORED
    return ChunkAccess.PLACES


@final
class _Reader:
    def __init__(self, descriptor: int, *, base: int, layout: DatasetLayout) -> None:
        assert layout.chunks is not None
        self._descriptor = descriptor
        self._base = base
        self._file_bytes = os.fstat(descriptor).st_size
        # A limit, since nodes that refer to each other in a cycle would be read endlessly.
        entry_bytes = 8 * (len(layout.chunks) + 4)
        self._left_bytes = (4 * layout.num_chunks + 10_000) * 2 * entry_bytes
        self._chunks = layout.chunks
        self._counts = tuple(-(-n // c) for n, c in zip(layout.shape, layout.chunks, strict=True))

    def index(self, header: int) -> ChunkIndex:
        root = self._tree_root(header)
        places = np.full((math.prod(self._counts), 3), -1, dtype=np.int64)
        strides = np.array([math.prod(self._counts[dim + 1 :]) for dim in range(len(self._counts))])
        if root != _NOWHERE:  # otherwise no chunk was written
            for offsets, found in self._leaves(root, depth=0):
                numbers, rest = np.divmod(offsets, np.array(self._chunks, dtype=np.int64))
                # After a dataset was made smaller, its index still has the chunks outside its extent.
                inside = (numbers < self._counts).all(axis=1)
                if rest.any() or (found[:, 0] + found[:, 1] > self._file_bytes).any():
                    raise _UnknownError
                places[(numbers * strides).sum(axis=1)[inside]] = found[inside]
        return ChunkIndex(places, counts=self._counts)

    def _tree_root(self, header: int) -> int:
        content, flags = self.layout_message(header)
        version, layout_class, num_dims = content[:3]
        if version != 3 or layout_class != _CHUNKED or flags & _SHARED_FLAG:
            raise _UnknownError
        root, *dims = struct.unpack_from(f"<Q{num_dims}I", content, 3)
        if tuple(dims[:-1]) != self._chunks:
            raise _UnknownError
        return int(root)

    def layout_message(self, header: int) -> tuple[bytes, int]:
        """Returns the content and the flags of the data layout message in an object header."""
        superblock = self._read(_Block(0, 16))
        sizes = superblock[13:15] if superblock[8] < 2 else superblock[9:11]
        if superblock[:8] != _SIGNATURE or bytes(sizes) != b"\x08\x08":
            raise _UnknownError
        for kind, flags, content in self._messages(header):
            if kind == _LAYOUT_MESSAGE:
                return content, flags
        raise _UnknownError

    def _messages(self, header: int) -> Iterator[tuple[int, int, bytes]]:
        """Yields the kind, the flags and the content of each message in an object header."""
        start = self._read(_Block(header, 16))
        if (
            start[:4] == b"OHDR"
        ):  # version 2: signature, version, flags, optional times and limits, size of the block
            flags = start[5]
            begin = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
            width = 1 << (flags & 3)
            size = int.from_bytes(self._read(_Block(header + begin, width)), "little")
            blocks, head = [_Block(header + begin + width, size)], struct.Struct("<BHB")
            skipped, around = (2 if flags & 4 else 0), 4
        elif start[0] == 1:  # version 1: version, number of messages, references, size of the block at byte 8
            blocks, head = (
                [_Block(header + 16, int.from_bytes(start[8:12], "little"))],
                struct.Struct("<HHB3x"),
            )
            skipped = around = 0
        else:
            raise _UnknownError
        for block in blocks:  # continuations are appended
            data = self._read(block)
            position = 0
            while position + head.size + skipped <= len(data):
                kind, size, message_flags = head.unpack_from(data, position)
                position += head.size + skipped
                content = data[position : position + size]
                position += size
                if kind == _CONTINUATION_MESSAGE and len(blocks) < _MAX_HEADER_BLOCKS:
                    offset, num_bytes = struct.unpack_from("<QQ", content)
                    # In version 2 a continuation begins with a signature and ends with a checksum.
                    blocks.append(_Block(offset + around, num_bytes - 2 * around))
                yield kind, message_flags, content

    def _leaves(self, node: int, *, depth: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yields two arrays for each leaf, below the node at offset `node`, of the B-tree that lists the chunks.

        The first array contains the index of the first element of each chunk, shape (n, dimensions). The second array
        contains the file offset, the size in bytes and the filter mask of each chunk, shape (n, 3).
        """
        start = self._read(_Block(node, _TREE_HEADER_BYTES))
        kind, level, used = struct.unpack_from("<BBH", start, 4)
        if start[:4] != b"TREE" or kind != 1 or depth + level > _MAX_DEPTH:
            raise _UnknownError
        entry = np.dtype([("size", "<u4"), ("mask", "<u4"), ("offset", "<u8", (len(self._chunks) + 1,)),
                          ("child", "<u8")])  # fmt: skip
        found = np.frombuffer(
            self._read(_Block(node + _TREE_HEADER_BYTES, used * entry.itemsize)), dtype=entry
        )
        if (found["child"] >= self._file_bytes).any() or (found["offset"] >> np.uint64(62)).any():
            raise _UnknownError
        if level:
            for child in found["child"].tolist():
                _, level_below = self._read(_Block(child, 6))[4:]
                if level_below != level - 1:
                    raise _UnknownError
                yield from self._leaves(child, depth=depth + 1)
            return
        places = np.stack([found["child"] + np.uint64(self._base), found["size"], found["mask"]], axis=1)
        yield found["offset"][:, :-1].astype(np.int64), places.astype(np.int64)

    def _read(self, block: _Block) -> bytes:
        """Returns the bytes of `block`. Raises _UnknownError if it is outside the file, or too much was read before."""
        if not 0 <= block.num_bytes <= _MAX_HEADER_BYTES or not 0 <= block.offset <= self._file_bytes:
            raise _UnknownError
        data = os.pread(self._descriptor, block.num_bytes, self._base + block.offset)
        self._left_bytes -= _TREE_HEADER_BYTES + len(data)
        if len(data) != block.num_bytes or self._left_bytes < 0:
            raise _UnknownError
        return data
