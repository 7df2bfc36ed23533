"""Asks the kernel to read whole blocks ahead for a block order: large reads, in the background.

The samples of a window are scattered over its blocks, and reading them one by one would be small reads. So when
the epoch enters a window, posix_fadvise(WILLNEED) requests the blocks of the next window, which are then in the page
cache when their samples are read. This is only a hint: nothing waits for it, and errors of it are ignored.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.data.format.manifest import Manifest
from hpctrain.data.order.block_shuffle import BlockOrder
from hpctrain.data.order.epoch_order import Order, Span
from hpctrain.data.reading.dataset import Dataset

# The kernel limits each hint to the readahead size of the device, which is 128 KiB by default.
_HINT_BYTES = 128 << 10


class CachedRange(NamedTuple):
    """Byte range of a file of the dataset."""

    file: str
    offset: int
    num_bytes: int


class ReadAhead:
    """Read-ahead hints for one epoch of one loader, from position `start` on. Thread-safe."""

    def __init__(self, dataset: Dataset, *, order: BlockOrder, start: int = 0) -> None:
        self._directory = dataset.directory
        self._manifest = dataset.manifest
        self._order = order
        self._first_samples = np.cumsum([0, *(shard.samples for shard in dataset.manifest.shards)])
        self._next_window = next(iter(order.windows_of(start, min(start + 1, order.num_samples))), 0)
        self._lock = threading.Lock()

    def before(self, span: Span) -> None:
        """Requests the windows of positions `span` and the next window. Call it before `span` is read."""
        reached = self._order.windows_of(*span)
        if not reached:
            return
        with self._lock:
            # Threads may call this out of order: the first caller requests all windows up to its own.
            first = self._next_window
            wanted = range(first, max(first, min(reached.stop + 1, self._order.num_windows)))
            self._next_window = wanted.stop
        for window in wanted:
            _ask(self._directory, list(self.byte_ranges(window)))

    def byte_ranges(self, window: int) -> Iterator[CachedRange]:
        """Yields the byte ranges of a window's blocks, for fields that are contiguous in files. Pure."""
        for block in self._order.blocks_of(window):
            shard = int(np.searchsorted(self._first_samples, block.start, side="right")) - 1
            while shard < len(self._manifest.shards) and self._first_samples[shard] < block.stop:
                first = int(self._first_samples[shard])
                rows = Span(max(block.start - first, 0), block.stop - first)
                yield from _rows_in(self._manifest, shard=shard, rows=rows)
                shard += 1


def read_ahead_for(dataset: object, order: Order, *, start: int = 0) -> ReadAhead | None:
    """Returns None if read-ahead cannot help: no `BlockOrder`, or token windows that are split at documents."""
    if not isinstance(dataset, Dataset) or not isinstance(order, BlockOrder) or dataset.manifest.is_split:
        return None
    return ReadAhead(dataset, order=order, start=start)


def _rows_in(manifest: Manifest, *, shard: int, rows: Span) -> Iterator[CachedRange]:
    entry = manifest.shards[shard]
    rows = Span(rows.start, min(rows.stop, entry.samples))
    for name, stored in entry.fields.items():
        spec = manifest.fields[name]
        if stored.offset is None or spec.kind != "array":
            continue
        sample_bytes = step = spec.sample_bytes
        skipped = 0 if stored.whole else stored.first_row * sample_bytes
        if manifest.tokens is not None:
            itemsize = np.dtype(spec.dtype).itemsize
            step, skipped = manifest.tokens.stride * itemsize, stored.first_row * itemsize
        num_bytes = (rows.num_samples - 1) * step + sample_bytes
        yield CachedRange(entry.file, stored.offset + skipped + rows.start * step, num_bytes)


def _ask(directory: Path, byte_ranges: list[CachedRange]) -> None:
    for file, parts in itertools.groupby(sorted(byte_ranges), key=lambda byte_range: byte_range.file):
        with contextlib.suppress(OSError):  # the read that follows reports the error
            descriptor = os.open(directory / file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for part in parts:
                    if _is_cached(descriptor, part):
                        continue
                    for done in range(0, part.num_bytes, _HINT_BYTES):
                        os.posix_fadvise(
                            descriptor, part.offset + done, min(_HINT_BYTES, part.num_bytes - done),
                            os.POSIX_FADV_WILLNEED,
                        )  # fmt: skip
            finally:
                os.close(descriptor)


def _is_cached(descriptor: int, part: CachedRange) -> bool:
    """True if its first, middle and last byte are in the page cache; False if the filesystem does not support this."""
    byte = bytearray(1)
    try:
        for place in (0, part.num_bytes // 2, part.num_bytes - 1):
            os.preadv(descriptor, [byte], part.offset + place, os.RWF_NOWAIT)
    except OSError:  # BlockingIOError: not in the cache
        return False
    return True
