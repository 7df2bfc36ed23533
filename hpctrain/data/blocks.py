"""The blocks that a manifest has hashes of: which samples touch them, and their bytes in the file."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpctrain.data import hdf5
from hpctrain.data.manifest import Manifest, ShardEntry
from hpctrain.data.read import check_shard
from hpctrain.data.shards import block_ranges, structure_hash

CONTENT_DIFFERS = "the content differs from its hash"
HEADERS_DIFFER = "the HDF5 headers differ from what was written"


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Bytes start, ..., stop - 1 of a field of a shard, as the manifest hashes them: little-endian, row-major."""

    shard: int
    field: str
    index: int
    start: int
    stop: int


def blocks_of(manifest: Manifest) -> Iterator[Block]:
    """All hashed blocks of a dataset, in the order of the manifest."""
    for shard, entry in enumerate(manifest.shards):
        for field, stored in entry.fields.items():
            ranges = block_ranges(stored.num_bytes, block_bytes=manifest.block_bytes)
            for index, (start, stop) in enumerate(ranges if stored.hashes else ()):
                yield Block(shard=shard, field=field, index=index, start=start, stop=stop)


def block_at(manifest: Manifest, *, shard: int, field: str, index: int) -> Block:
    """Block number `index` of a field of a shard."""
    start = index * manifest.block_bytes
    stop = min(start + manifest.block_bytes, manifest.shards[shard].fields[field].num_bytes)
    return Block(shard=shard, field=field, index=index, start=start, stop=stop)


def samples_of(manifest: Manifest, block: Block) -> tuple[int, int]:
    """First and last sample of the shard that touch the block."""
    last = manifest.shards[block.shard].samples - 1
    spec = manifest.fields[block.field]
    if manifest.tokens is None:
        return block.start // spec.sample_bytes, min(last, (block.stop - 1) // spec.sample_bytes)
    itemsize = np.dtype(spec.dtype).itemsize
    first_token, last_token = block.start // itemsize, (block.stop - 1) // itemsize
    window, stride = manifest.tokens.window, manifest.tokens.stride
    return min(last, max(0, -(-(first_token - window) // stride))), min(last, last_token // stride)


def blocks_touched(
    manifest: Manifest, *, field: str, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Index of the first and of the last block that each sample `rows` of a shard touches; shapes as `rows`."""
    spec = manifest.fields[field]
    if manifest.tokens is None:
        start, num_bytes = rows * spec.sample_bytes, spec.sample_bytes
    else:
        itemsize = np.dtype(spec.dtype).itemsize
        start = rows * (manifest.tokens.stride * itemsize)
        num_bytes = (manifest.tokens.window + 1) * itemsize
    return start // manifest.block_bytes, (start + (num_bytes - 1)) // manifest.block_bytes


class BlockFile:
    """Blocks of one shard, from their place in the file or, re-packed, through h5py. Safe in threads.

    Raises DataError (see `check_shard`) and OSError when it is made. The file is closed with the last reference.
    """

    def __init__(self, directory: Path, *, manifest: Manifest, entry: ShardEntry) -> None:
        self._manifest = manifest
        self._entry = entry
        self._layouts = check_shard(directory, manifest=manifest, entry=entry)
        self._buffers = threading.local()
        self._descriptor = os.open(directory / entry.file, os.O_RDONLY | os.O_CLOEXEC)
        self._close_descriptor = weakref.finalize(self, os.close, self._descriptor)
        self._rows: hdf5.RowReader | None = None
        if not all(self._is_as_written(name) for name in entry.fields):
            self._rows = hdf5.RowReader(directory / entry.file)

    def _is_as_written(self, name: str) -> bool:
        layout, spec = self._layouts[name], self._manifest.fields[name]
        return layout.offset is not None and layout.dtype == spec.stored_dtype

    def structure_is_sound(self) -> bool:
        """Whether HDF5's own bytes are as written; a re-packed file has others, its content decides."""
        entry = self._entry
        if entry.structure_hash is None:
            return True
        extents = []
        for name, stored in entry.fields.items():
            if stored.offset is None or self._layouts[name].offset != stored.offset:
                return True
            extents.append((stored.offset, stored.num_bytes))
        found_bytes = os.fstat(self._descriptor).st_size
        return (
            structure_hash(self._descriptor, file_bytes=found_bytes, extents=extents) == entry.structure_hash
        )

    def fault_of(self, block: Block) -> str | None:
        """What is wrong with a block, in words; None: it is as the manifest says. Reads it from the file."""
        try:
            data = self._read(block)
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            return f"cannot be read: {error}"
        if len(data) < block.stop - block.start:
            return f"the file ends {block.stop - block.start - len(data)} bytes before the block does"
        if xxhash.xxh3_64_hexdigest(data) == self._entry.fields[block.field].hashes[block.index]:
            return None
        return CONTENT_DIFFERS

    def _read(self, block: Block) -> memoryview | bytes:
        """The block's bytes; fewer where the file ends before."""
        layout = self._layouts[block.field]
        if self._is_as_written(block.field) and layout.offset is not None:
            return self._read_at(layout.offset + block.start, num_bytes=block.stop - block.start)
        assert self._rows is not None
        stored = self._entry.fields[block.field]
        row_bytes = stored.num_bytes // layout.shape[0]
        first, last = block.start // row_bytes, (block.stop - 1) // row_bytes
        rows: NDArray[Any] = self._rows.rows(stored.dataset, start=first, stop=last + 1)
        data = np.ascontiguousarray(rows, dtype=self._manifest.fields[block.field].stored_dtype).tobytes()
        return data[block.start - first * row_bytes : block.stop - first * row_bytes]

    def _read_at(self, offset: int, *, num_bytes: int) -> memoryview:
        # One buffer a thread: fresh memory for each block would cost as much as hashing it.
        buffer: memoryview | None = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers.buffer = memoryview(bytearray(num_bytes))
        done = 0
        while done < num_bytes:
            read = os.preadv(self._descriptor, [buffer[done:num_bytes]], offset + done)
            if read == 0:
                break
            done += read
        return buffer[:done]

    def close(self) -> None:
        """Close the file. May be called again."""
        self._close_descriptor()
        if self._rows is not None:
            self._rows.close()
