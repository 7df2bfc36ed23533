"""Copies one shard's file, and compares it with the manifest's hashes while copying."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from hpctrain.data.format.manifest import Manifest, ShardEntry
from hpctrain.data.format.shard_file import block_ranges, read_bytes
from hpctrain.errors import DataError
from hpctrain.storage import hash_of, write_fully

_PIECE_BYTES = 1 << 20


class CopyStopped(Exception):
    """Raised if `stop` was set before the copy was complete."""


def copy_file(
    source: Path, target: Path, *, manifest: Manifest, entries: Sequence[ShardEntry], stop: threading.Event
) -> None:
    """Copies a file of a dataset to `target`, with its modification time. Removes `target` on an error.

    entries: entries of the manifest that are in the file. While copying, contiguous hashed fields are compared with
    their hashes block by block, and the HDF5 headers with the structure hash. Then the copy is read back and compared
    with the bytes read from the source; this is the only check for chunks and for fields without hashes.
    Raises DataError if the content differs, OSError after an error of a filesystem, CopyStopped if `stop` was set.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        entry = entries[0]
        if status.st_size != entry.file_bytes:
            raise DataError(f"{source} has {status.st_size} bytes, the manifest says {entry.file_bytes}")
        if entry.modified_ns is not None and status.st_mtime_ns != entry.modified_ns:
            raise DataError(f"{source} was changed since it was indexed: index it again")
        written = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A full disk raises an error here, not in the middle of the copy.
            os.posix_fallocate(written, 0, status.st_size)
            _copy(descriptor, written, source=source, manifest=manifest, entries=entries, stop=stop)
            # Access time 0: the copy was not read since it was made, see `hpctrain.data.locality.stage_copier`.
            os.utime(written, ns=(0, status.st_mtime_ns))
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(written)
    finally:
        os.close(descriptor)


def _copy(
    descriptor: int, written: int, *, source: Path, manifest: Manifest, entries: Sequence[ShardEntry],
    stop: threading.Event,
) -> None:  # fmt: skip
    blocks = _hashed_blocks(manifest, entries=entries)
    structure_hash = entries[0].structure_hash if len(entries) == 1 and blocks is not None else None
    structure, whole = xxhash.xxh3_64(), xxhash.xxh3_64()
    for start, stop_byte, expected in _pieces(blocks or [], file_bytes=entries[0].file_bytes):
        if stop.is_set():
            raise CopyStopped
        data = read_bytes(descriptor, stop_byte - start, offset=start)
        if len(data) < stop_byte - start:
            raise DataError(f"{source} ends at byte {start + len(data)}, while it is copied")
        if expected is None:
            structure.update(data)
        elif hash_of(data) != expected:
            raise DataError(f"{source} is damaged: bytes {start} to {stop_byte - 1} differ from their hash")
        whole.update(data)
        write_fully(written, memoryview(data), offset=start)
    if structure_hash is not None and structure.hexdigest() != structure_hash:
        raise DataError(f"{source} is damaged: its HDF5 headers differ from what was written")
    again = xxhash.xxh3_64()
    for start in range(0, entries[0].file_bytes, _PIECE_BYTES):
        if stop.is_set():
            raise CopyStopped
        again.update(read_bytes(written, min(_PIECE_BYTES, entries[0].file_bytes - start), offset=start))
    if again.digest() != whole.digest():
        raise DataError(f"the copy of {source} differs from what was written")


Piece = tuple[int, int, str | None]
"""(start, stop, expected hash) of a byte range; the hash is None if the range has none."""


def _hashed_blocks(manifest: Manifest, *, entries: Sequence[ShardEntry]) -> list[Piece] | None:
    """Returns the hashed blocks of the file, sorted by offset; None if a field has none, or blocks overlap."""
    blocks: list[Piece] = []
    for entry in entries:
        for name, stored in entry.fields.items():
            if stored.offset is None or not stored.hashes or stored.big_endian or stored.first_row:
                return None
            assert name in manifest.fields
            ranges = block_ranges(stored.num_bytes, block_bytes=manifest.block_bytes)
            for (start, stop), expected in zip(ranges, stored.hashes, strict=True):
                blocks.append((stored.offset + start, stored.offset + stop, expected))
    blocks.sort()
    if any(first[1] > second[0] for first, second in itertools.pairwise(blocks)):
        return None
    return blocks


def _pieces(blocks: Sequence[Piece], *, file_bytes: int) -> Iterator[Piece]:
    """Yields the whole file in order: the blocks, and the bytes between them in pieces of bounded size."""
    position = 0
    for start, stop, expected in [*blocks, (file_bytes, file_bytes, None)]:
        while position < start:
            end = min(position + _PIECE_BYTES, start)
            yield position, end, None
            position = end
        if stop > start:
            yield start, stop, expected
            position = stop
