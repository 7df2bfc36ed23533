"""Reads every byte of a dataset again and compares it with the hashes of the manifest.

The blocks are divided over the ranks, without communication: the caller gathers what each rank found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from hpctrain.data import hdf5
from hpctrain.data.manifest import MANIFEST_NAME, Manifest, ShardEntry, read_manifest
from hpctrain.data.order import rank_share
from hpctrain.data.read import check_shard
from hpctrain.data.shards import block_ranges, read_fully, structure_hash
from hpctrain.errors import DataError

Progress = Callable[[int, int], None]
"""Called with (done, total) bytes of this rank's part."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One damaged stretch. Samples count within the shard; field is None if the whole shard is concerned."""

    shard: str
    field: str | None
    first_sample: int
    last_sample: int
    reason: str

    def describe(self) -> str:
        where = "the whole shard" if self.field is None else f"field {self.field!r}"
        return f"{self.shard}, {where}, samples {self.first_sample} to {self.last_sample}: {self.reason}"

    def as_json(self) -> dict[str, str | int | None]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    shard: int
    field: str
    index: int
    start: int
    stop: int


def _blocks(manifest: Manifest) -> Iterator[_Block]:
    for shard, entry in enumerate(manifest.shards):
        for field, stored in entry.fields.items():
            for index, (start, stop) in enumerate(
                block_ranges(stored.num_bytes, block_bytes=manifest.block_bytes)
            ):
                yield _Block(shard=shard, field=field, index=index, start=start, stop=stop)


def _samples_of(manifest: Manifest, block: _Block) -> tuple[int, int]:
    """First and last sample of the shard that touch the block."""
    last = manifest.shards[block.shard].samples - 1
    spec = manifest.fields[block.field]
    if manifest.tokens is None:
        return block.start // spec.sample_bytes, min(last, (block.stop - 1) // spec.sample_bytes)
    itemsize = np.dtype(spec.dtype).itemsize
    first_token, last_token = block.start // itemsize, (block.stop - 1) // itemsize
    window, stride = manifest.tokens.window, manifest.tokens.stride
    return min(last, max(0, -(-(first_token - window) // stride))), min(last, last_token // stride)


class _ShardFile:
    """Blocks of one shard, from their place in the file or, re-packed, through h5py."""

    def __init__(self, directory: Path, *, manifest: Manifest, entry: ShardEntry) -> None:
        self._manifest = manifest
        self._entry = entry
        self._layouts = check_shard(directory, manifest=manifest, entry=entry)
        self._descriptor = os.open(directory / entry.file, os.O_RDONLY | os.O_CLOEXEC)
        self._rows: hdf5.RowReader | None = None
        if not all(self._is_as_written(name) for name in entry.fields):
            self._rows = hdf5.RowReader(directory / entry.file)

    def _is_as_written(self, name: str) -> bool:
        layout, spec = self._layouts[name], self._manifest.fields[name]
        return layout.offset is not None and layout.dtype == spec.stored_dtype

    def structure_is_sound(self) -> bool:
        """Whether HDF5's own bytes are as written; a re-packed file has others, its content decides."""
        entry = self._entry
        if any(self._layouts[name].offset != stored.offset for name, stored in entry.fields.items()):
            return True
        found_bytes = os.fstat(self._descriptor).st_size
        extents = [(stored.offset, stored.num_bytes) for stored in entry.fields.values()]
        return (
            structure_hash(self._descriptor, file_bytes=found_bytes, extents=extents) == entry.structure_hash
        )

    def read(self, block: _Block) -> bytes:
        layout = self._layouts[block.field]
        if self._is_as_written(block.field) and layout.offset is not None:
            return read_fully(self._descriptor, block.stop - block.start, offset=layout.offset + block.start)
        assert self._rows is not None
        stored = self._entry.fields[block.field]
        row_bytes = stored.num_bytes // layout.shape[0]
        first, last = block.start // row_bytes, (block.stop - 1) // row_bytes
        rows = self._rows.rows(stored.dataset, start=first, stop=last + 1)
        data = np.ascontiguousarray(rows, dtype=self._manifest.fields[block.field].stored_dtype).tobytes()
        return data[block.start - first * row_bytes : block.stop - first * row_bytes]

    def close(self) -> None:
        os.close(self._descriptor)
        if self._rows is not None:
            self._rows.close()


def verify(
    directory: Path | str, *, rank: int = 0, num_ranks: int = 1, progress: Progress | None = None
) -> list[Damage]:
    """Hash this rank's part of the blocks again; returns what differs, in the order of the manifest.

    Each block is read by just one of the ranks; a missing or unreadable shard is reported by every rank that
    has a block of it (see `merge`). Raises DataError if the manifest itself cannot be used.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    blocks = list(_blocks(manifest))
    share = rank_share(0, len(blocks), rank=rank, num_ranks=num_ranks)
    mine = blocks[share.start : share.stop]
    total = sum(block.stop - block.start for block in mine)
    damages: list[Damage] = []
    done = 0
    by_shard: dict[int, list[_Block]] = {}
    for block in mine:
        by_shard.setdefault(block.shard, []).append(block)
    for shard, shard_blocks in by_shard.items():
        entry = manifest.shards[shard]
        try:
            file = _ShardFile(directory, manifest=manifest, entry=entry)
        except (DataError, OSError) as error:
            damages.append(_whole_shard(entry, str(error)))
            continue
        try:
            # Whoever has the first block of a shard also looks at its headers.
            first = shard_blocks[0]
            if first.start == 0 and first.field == next(iter(entry.fields)) and not file.structure_is_sound():
                damages.append(_whole_shard(entry, "the HDF5 headers differ from what was written"))
            for block in shard_blocks:
                reason = _check_block(file, entry, block)
                if reason is not None:
                    first_sample, last_sample = _samples_of(manifest, block)
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
    return merge(damages)


def _check_block(file: _ShardFile, entry: ShardEntry, block: _Block) -> str | None:
    try:
        data = file.read(block)
    except (OSError, RuntimeError, ValueError) as error:
        return f"cannot be read: {error}"
    if xxhash.xxh3_64_hexdigest(data) == entry.fields[block.field].hashes[block.index]:
        return None
    return "the content differs from its hash"


def _whole_shard(entry: ShardEntry, reason: str) -> Damage:
    return Damage(shard=entry.file, field=None, first_sample=0, last_sample=entry.samples - 1, reason=reason)


def merge(damages: list[Damage]) -> list[Damage]:
    """Join neighbouring and repeated stretches of the same field and reason; order is kept."""
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
    """The dataset at `directory`, or those right below it (train, test). Raises DataError if none."""
    directory = Path(directory)
    if not (directory / MANIFEST_NAME).exists() and directory.is_dir():
        below = sorted(child for child in directory.iterdir() if (child / MANIFEST_NAME).exists())
        if below:
            return below
    read_manifest(directory)
    return [directory]
