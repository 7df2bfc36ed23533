"""Copies one shard's file, and compares it with the manifest's hashes on the way."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from hpctrain.data.format.manifest import Manifest, ShardEntry
from hpctrain.data.format.shard_file import block_ranges, read_fully, write_fully
from hpctrain.errors import DataError

_PIECE_BYTES = 1 << 20


class CopyStopped(Exception):
    """The copy was to end before it was complete."""


def copy_file(
    source: Path, target: Path, *, manifest: Manifest, entries: Sequence[ShardEntry], stop: threading.Event
) -> None:
    """Copy a file of a dataset to `target`, with its time of change. On an error nothing is left there.

    entries: those of the manifest that lie in the file. Contiguous, hashed fields are compared with their
    hashes block by block, HDF5's own bytes with theirs, as they go by. Then the copy is read back and compared
    with what was read from the source, which is all there is to compare for chunks and for what has no hashes.
    Raises DataError if the content differs, OSError if a file system refuses, CopyStopped.
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
            # A full disk is met here, not in the middle of the copy.
            os.posix_fallocate(written, 0, status.st_size)
            _copy(descriptor, written, source=source, manifest=manifest, entries=entries, stop=stop)
            # The time of use is 0 until somebody reads it: see `hpctrain.data.locality.stage_copier`.
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
        data = read_fully(descriptor, stop_byte - start, offset=start)
        if len(data) < stop_byte - start:
            raise DataError(f"{source} ends at byte {start + len(data)}, while it is copied")
        if expected is None:
            structure.update(data)
        elif xxhash.xxh3_64_hexdigest(data) != expected:
            raise DataError(f"{source} is damaged: bytes {start} to {stop_byte - 1} differ from their hash")
        whole.update(data)
        write_fully(written, memoryview(data), offset=start)
    if structure_hash is not None and structure.hexdigest() != structure_hash:
        raise DataError(f"{source} is damaged: its HDF5 headers differ from what was written")
    again = xxhash.xxh3_64()
    for start in range(0, entries[0].file_bytes, _PIECE_BYTES):
        if stop.is_set():
            raise CopyStopped
        again.update(read_fully(written, min(_PIECE_BYTES, entries[0].file_bytes - start), offset=start))
    if again.digest() != whole.digest():
        raise DataError(f"the copy of {source} differs from what was written")


Piece = tuple[int, int, str | None]
"""First byte, byte behind the last, and the hash that the bytes must have; None: no hash of their own."""


def _hashed_blocks(manifest: Manifest, *, entries: Sequence[ShardEntry]) -> list[Piece] | None:
    """The hashed blocks of the file by their place; None if not all its fields have some, or they overlap."""
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
    """The whole file in order: the blocks, and what lies between them in pieces of bounded size."""
    position = 0
    for start, stop, expected in [*blocks, (file_bytes, file_bytes, None)]:
        while position < start:
            end = min(position + _PIECE_BYTES, start)
            yield position, end, None
            position = end
        if stop > start:
            yield start, stop, expected
            position = stop
