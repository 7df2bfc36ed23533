"""Hashed blocks of a dataset: finds which samples a block contains, reads its bytes, and verifies a whole dataset."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest import MANIFEST_NAME, Manifest, ShardEntry, read_manifest
from hpctrain.data.format.shard_file import HEADERS_DIFFER, HeadersDamaged, check_shard, hash_outside_extents
from hpctrain.data.format.token_windows import read_windows
from hpctrain.data.hdf5.filters import can_undo
from hpctrain.data.hdf5.layout import MissingFilter, RowReader
from hpctrain.data.order.epoch_order import rank_share
from hpctrain.data.reading.chunked import ChunkedField, StoredChunks
from hpctrain.data.reading.field_reader import ChunkCache, FieldName, OpenFile, ReadRequest
from hpctrain.errors import DataError
from hpctrain.storage import hash_of

CACHE_BYTES = 32 << 20

CONTENT_DIFFERS = "the content differs from its hash"


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of data that has a hash: bytes start to stop - 1 of a field's data in one shard.

    The bytes are counted in the little-endian row-major form of the data. `shard` is the index of the shard in the
    manifest, and `index` is the index of the block in the field.
    """

    shard: int
    field: str
    index: int
    start: int
    stop: int


def is_hashed(manifest: Manifest, *, shard: int, field: str) -> bool:
    """Returns True if the field has hashes in this shard. Rows of variable length and strings have no hashes."""
    return bool(manifest.shards[shard].fields[field].hashes) and manifest.fields[field].kind == "array"


def blocks_of(manifest: Manifest) -> Iterator[Block]:
    """Yields all blocks of a dataset that have a hash: shard by shard, and field by field within a shard."""
    for shard, entry in enumerate(manifest.shards):
        for field, stored in entry.fields.items():
            if is_hashed(manifest, shard=shard, field=field):
                for index in range(len(stored.hashes)):
                    yield block_at(manifest, shard=shard, field=field, index=index)


def block_at(manifest: Manifest, *, shard: int, field: str, index: int) -> Block:
    """Returns the block of index `index` of a field in a shard. The manifest has one hash per block.

    `shard` is the index of the shard in the manifest.
    """
    start = index * manifest.block_bytes
    stop = min(start + manifest.block_bytes, manifest.shards[shard].fields[field].num_bytes)
    return Block(shard=shard, field=field, index=index, start=start, stop=stop)


def samples_of(manifest: Manifest, block: Block, *, windows: NDArray[np.int64] | None) -> tuple[int, int]:
    """Returns the indices, within the shard, of the first and the last sample that have bytes in `block`.

    `block` is a range of a field's bytes with one hash. If no sample has bytes in the block, both are the index of the
    nearest sample. If the manifest has a list of token windows, `windows` contains the index of the first token of each
    window in the shard, int64; else it is None.
    """
    last = manifest.shards[block.shard].samples - 1
    spec = manifest.fields[block.field]
    if manifest.tokens is None:
        return block.start // spec.sample_bytes, min(last, (block.stop - 1) // spec.sample_bytes)
    itemsize = np.dtype(spec.dtype).itemsize
    first_token, last_token = block.start // itemsize, (block.stop - 1) // itemsize
    window, stride = manifest.tokens.window, manifest.tokens.stride
    if windows is None:
        return min(last, max(0, -(-(first_token - window) // stride))), min(last, last_token // stride)
    first_sample = min(last, int(np.searchsorted(windows, first_token - window)))
    return first_sample, max(first_sample, int(np.searchsorted(windows, last_token, side="right")) - 1)


def blocks_touched(
    manifest: Manifest, *, field: str, rows: NDArray[np.int64], windows: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns for each sample the indices of the first and of the last hashed block with bytes of the sample.

    The result is two int64 arrays of shape (n,). The field is divided into blocks of `manifest.block_bytes` bytes, each
    of which has a hash. `rows` are the indices of the samples within their shard: int64, shape (n,). If the manifest
    has a list of token windows, `windows` contains the index of the first token of each window in the shard, int64;
    else it is None.
    """
    spec = manifest.fields[field]
    if manifest.tokens is None:
        start = rows * spec.sample_bytes
    else:
        tokens = rows * manifest.tokens.stride if windows is None else windows[rows]
        start = tokens * np.dtype(spec.dtype).itemsize
    return start // manifest.block_bytes, (start + (spec.sample_bytes - 1)) // manifest.block_bytes


class BlockFile:
    """Reads blocks of one shard file, to compare them with their hashes. Thread-safe.

    Data is read as for batches: directly, by decoding chunks, or through h5py. If `path` is given, it leads to a copy
    of the file, and the copy is read. `cache_bytes` is the maximum size of the cache of decoded chunks, which is useful
    because a chunk may overlap several blocks. The constructor raises DataError (see `check_shard`) or OSError. The
    file is closed when the last reference to this object is deleted.
    """

    def __init__(
        self,
        directory: Path,
        *,
        manifest: Manifest,
        entry: ShardEntry,
        path: Path | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.path = directory / entry.file if path is None else path
        self._manifest = manifest
        self._entry = entry
        self._layouts = check_shard(directory, manifest=manifest, entry=entry, path=path)
        self._buffers = threading.local()
        self._file = OpenFile(self.path)
        self._rows: RowReader | None = None
        if not all(self._is_in_place(name) for name in entry.fields):
            self._rows = RowReader(self.path)
        self._cache = ChunkCache(capacity_bytes=cache_bytes)
        self._chunked = {name: self._chunked_field(name) for name in entry.fields if self._is_decodable(name)}

    def _is_decodable(self, name: str) -> bool:
        layout = self._layouts[name]
        plain = self._entry.fields[name].member is None and self._manifest.fields[name].kind == "array"
        return plain and not layout.only_hdf5 and layout.chunks is not None and can_undo(layout.filters)

    def _chunked_field(self, name: str) -> ChunkedField:
        assert self._rows is not None
        source = StoredChunks(
            self._rows, file=self._file, dataset=self._entry.fields[name].dataset,
            layout=self._layouts[name],
        )  # fmt: skip
        return ChunkedField(source, cache=self._cache, shard=0, name=FieldName(path=self.path, field=name))

    def _is_in_place(self, name: str) -> bool:
        """Returns True if the field `name` is contiguous and little-endian in the file, the form that is hashed."""
        layout, spec = self._layouts[name], self._manifest.fields[name]
        return layout.offset is not None and spec.kind == "array" and layout.dtype == spec.stored_dtype

    @property
    def has_chunks(self) -> bool:
        """True if a field is not contiguous in the file, but for example chunked.

        The hash of the file's structure (the bytes outside contiguous fields) then covers the field's samples too.
        """
        return any(stored.offset is None for stored in self._entry.fields.values())

    def structure_is_sound(self) -> bool:
        """Returns True if the bytes outside contiguous datasets (HDF5 headers, chunks) match their hash.

        Also returns True if the manifest has no such hash, or if the file was rewritten with other HDF5 tools, which
        changes these bytes.
        """
        entry = self._entry
        if entry.structure_hash is None:
            return True
        for name, stored in entry.fields.items():
            layout = self._layouts[name]
            if layout.offset != stored.offset or (layout.chunks is None) != (stored.offset is not None):
                return True
        found_bytes = os.fstat(self._file.descriptor).st_size
        extents = [(f.offset, f.num_bytes) for f in entry.fields.values() if f.offset is not None]
        return (
            hash_outside_extents(self._file.descriptor, file_bytes=found_bytes, extents=extents)
            == entry.structure_hash
        )

    def fault_of(self, block: Block) -> str | None:
        """Reads a block and compares it with its hash. Returns None if they agree, else a text that says what is wrong.

        Raises MissingFilter if this process lacks the HDF5 filter to decode the block. The block may then be sound.
        """
        try:
            data = self._read(block)
        except MissingFilter as error:
            raise MissingFilter(
                f"field {block.field!r} of shard {self.path} cannot be read: {error}"
            ) from error
        except (DataError, OSError, RuntimeError, ValueError, KeyError) as error:
            return f"cannot be read: {error.__cause__ or error}"
        if len(data) < block.stop - block.start:
            return f"the file ends {block.stop - block.start - len(data)} bytes before the block does"
        if hash_of(data) == self._entry.fields[block.field].hashes[block.index]:
            return None
        return CONTENT_DIFFERS

    def _read(self, block: Block) -> memoryview | bytes:
        """Returns the bytes of the block. They are fewer if the file ends before the end of the block."""
        layout, stored = self._layouts[block.field], self._entry.fields[block.field]
        spec = self._manifest.fields[block.field]
        in_rows = not stored.whole or bool(layout.shape)
        if stored.whole:
            row_bytes = stored.num_bytes // max(1, layout.shape[0]) if in_rows else stored.num_bytes
        elif self._manifest.tokens is not None:
            row_bytes = np.dtype(spec.dtype).itemsize
        else:
            row_bytes = spec.sample_bytes
        if self._is_in_place(block.field) and layout.offset is not None:
            offset = layout.offset + stored.first_row * row_bytes + block.start
            return self._read_at(offset, num_bytes=block.stop - block.start)
        first, last = block.start // row_bytes, (block.stop - 1) // row_bytes
        if in_rows:
            start = stored.first_row + first
            rows = self._some_rows(block.field, start=start, stop=stored.first_row + last + 1)
        else:
            assert self._rows is not None
            rows = self._rows.whole(stored.dataset, member=stored.member)
        data = np.ascontiguousarray(rows, dtype=spec.stored_dtype).tobytes()
        return data[block.start - first * row_bytes : block.stop - first * row_bytes]

    def _some_rows(self, name: str, *, start: int, stop: int) -> NDArray[Any]:
        """Reads rows start to stop - 1 of the HDF5 dataset of the field `name`."""
        stored, layout = self._entry.fields[name], self._layouts[name]
        field = self._chunked.get(name)
        if field is None:
            assert self._rows is not None
            return self._rows.rows(stored.dataset, start=start, stop=stop, member=stored.member)
        target: NDArray[Any] = np.empty((1, stop - start, *layout.shape[1:]), layout.dtype.newbyteorder("="))
        request = ReadRequest(samples=np.array([0]), starts=np.array([start]), places=None, target=target)
        for task in field.begin(request):
            task()
        return target

    def _read_at(self, offset: int, *, num_bytes: int) -> memoryview:
        # One buffer per thread: new memory for each block would cost as much as hashing it.
        buffer: memoryview | None = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers.buffer = memoryview(bytearray(num_bytes))
        done = 0
        while done < num_bytes:
            read = os.preadv(self._file.descriptor, [buffer[done:num_bytes]], offset + done)
            if read == 0:
                break
            done += read
        return buffer[:done]

    def close(self) -> None:
        """Closes the file. May be called more than once."""
        self._file.close()
        if self._rows is not None:
            self._rows.close()


# Reads every byte of a dataset and compares it with the hashes of the manifest.
#
# The blocks are divided among the ranks, without communication: the caller gathers the damage that each
# rank found.


Progress = Callable[[int, int], None]
"""Function that is called with the number of bytes that this rank has checked, and with the size of its share."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A damaged range of samples in one shard.

    Attributes:
        shard: File name of the shard.
        field: Name of the field; None if the whole shard is damaged.
        first_sample: Index within the shard of the first sample that may be damaged.
        last_sample: Index within the shard of the last sample that may be damaged.
        reason: The fault that was found, in words.
    """

    shard: str
    field: str | None
    first_sample: int
    last_sample: int
    reason: str

    def describe(self) -> str:
        """Returns shard, field, samples and reason as a text for messages."""
        where = "the whole shard" if self.field is None else f"field {self.field!r}"
        return f"{self.shard}, {where}, samples {self.first_sample} to {self.last_sample}: {self.reason}"

    def as_json(self) -> dict[str, str | int | None]:
        return asdict(self)


def verify_dataset(
    directory: Path | str, *, rank: int = 0, num_ranks: int = 1, progress: Progress | None = None
) -> list[Damage]:
    """Reads and hashes this rank's share of a dataset's blocks, and compares them with the manifest. Not collective.

    Each block is read by exactly one rank. A missing or unreadable shard is reported by every rank whose share
    contains a block of that shard. The caller has to gather the damage that the ranks have found.

    Args:
        directory: Directory of the dataset.
        rank: Index of the share to read.
        num_ranks: Number of shares.
        progress: Called after each block with the number of bytes done so far, and with the size of the share in
            bytes; None: not called.

    Returns:
        The damage that was found, in the order of the manifest. Empty if no damage was found.

    Raises:
        DataError: If the manifest cannot be used.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    windows = read_windows(directory, manifest=manifest)
    starts = [0, *accumulate(entry.samples for entry in manifest.shards)]
    blocks = list(blocks_of(manifest))
    share = rank_share(0, len(blocks), rank=rank, num_ranks=num_ranks)
    mine = blocks[share.start : share.stop]
    total = sum(block.stop - block.start for block in mine)
    damages: list[Damage] = []
    done = 0
    by_shard: dict[int, list[Block]] = {}
    for block in mine:
        by_shard.setdefault(block.shard, []).append(block)
    for shard, shard_blocks in by_shard.items():
        entry = manifest.shards[shard]
        try:
            file = BlockFile(directory, manifest=manifest, entry=entry)
        except HeadersDamaged:
            damages.append(_whole_shard(entry, HEADERS_DIFFER))
            continue
        except (DataError, OSError) as error:
            damages.append(_whole_shard(entry, str(error)))
            continue
        try:
            # The rank that has the first block of a shard also checks its headers.
            first = shard_blocks[0]
            if first.start == 0 and first.field == next(iter(entry.fields)) and not file.structure_is_sound():
                damages.append(_whole_shard(entry, HEADERS_DIFFER))
            for block in shard_blocks:
                reason = file.fault_of(block)
                if reason is not None:
                    first_sample, last_sample = samples_of(
                        manifest,
                        block,
                        windows=None if windows is None else windows[starts[shard] : starts[shard + 1]],
                    )
                    damages.append(
                        Damage(
                            shard=entry.file,
                            field=block.field,
                            first_sample=first_sample,
                            last_sample=last_sample,
                            reason=reason,
                        )
                    )
                done += block.stop - block.start
                if progress is not None:
                    progress(done, total)
        finally:
            file.close()
    return merge_damage(damages)


def _whole_shard(entry: ShardEntry, reason: str) -> Damage:
    return Damage(shard=entry.file, field=None, first_sample=0, last_sample=entry.samples - 1, reason=reason)


def merge_damage(damages: list[Damage]) -> list[Damage]:
    """Joins damaged ranges of samples that overlap or are adjacent, and have the same shard, field and reason.

    Only consecutive elements of the list are joined. The order is kept.
    """
    merged: list[Damage] = []
    for damage in damages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.shard, last.field, last.reason) == (damage.shard, damage.field, damage.reason)
            and damage.first_sample <= last.last_sample + 1
        ):
            merged[-1] = replace(last, last_sample=max(last.last_sample, damage.last_sample))
        else:
            merged.append(damage)
    return merged


def find_datasets(directory: Path | str) -> list[Path]:
    """Returns `directory` if it is a dataset, else the datasets directly below it, such as train and test.

    Args:
        directory: Directory of a dataset, or a directory that contains datasets.

    Returns:
        The directories of the datasets, sorted.

    Raises:
        DataError: If no dataset was found.
    """
    directory = Path(directory)
    if not (directory / MANIFEST_NAME).exists() and directory.is_dir():
        below = sorted(child for child in directory.iterdir() if (child / MANIFEST_NAME).exists())
        if below:
            return below
    read_manifest(directory)
    return [directory]
