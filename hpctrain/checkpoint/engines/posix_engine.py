"""Direct engine: every rank writes its bytes to their positions in the file with pwrite, without MPI.

Works on any POSIX filesystem that all ranks share. Contiguous byte ranges are written by one call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from hpctrain.checkpoint.files.direct_io import open_uncached, write_uncached
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.files.syscalls import begin_writing_back
from hpctrain.checkpoint.files.write_buffers import Staging
from hpctrain.storage import write_fully

# Small enough that a batch is still in the processor's cache after hashing.
_BATCH_BYTES = 1 << 20
_MAX_VIEWS = 512  # systems allow at least 1024 in one call
_WRITTEN_BACK_BYTES = 8 << 20
_LONG_STRUCTURE_BYTES = 1 << 20  # shorter byte ranges are written back by the fsync at the end


def write_direct(
    path: Path,
    byte_ranges: Iterable[tuple[int, memoryview]],
    *,
    structure: Iterable[tuple[int, memoryview]] = (),
    bypass_cache: bool = False,
    staging: Staging | None = None,
) -> None:
    """Writes this rank's byte ranges, (offset, bytes), to the existing file at `path` and flushes them to disk. Not
    collective. Raises CheckpointError.

    Starts writeback early, so that the fsync at the end is short. bypass_cache: write `byte_ranges` past the page cache
    if the filesystem supports it, but not `structure`, which is soon read back. staging: memory to join byte ranges in.
    """
    with explained(action="write", path=path), ExitStack() as opened:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        opened.callback(os.close, fd)
        for offset, data in structure:
            write_fully(fd, data, offset=offset)
            if data.nbytes >= _LONG_STRUCTURE_BYTES:
                begin_writing_back(fd, offset=offset, num_bytes=data.nbytes)
        uncached = open_uncached(path) if bypass_cache else None
        if uncached is None:
            _write_cached(fd, byte_ranges)
        else:
            opened.callback(os.close, uncached)
            write_uncached(fd, uncached, byte_ranges, staging=staging or Staging())
        os.fsync(fd)


def _write_cached(fd: int, byte_ranges: Iterable[tuple[int, memoryview]]) -> None:
    batch: list[memoryview] = []
    begin = end = 0
    flow = _Flow(fd)
    for offset, data in byte_ranges:
        if batch and (offset != end or end - begin >= _BATCH_BYTES or len(batch) == _MAX_VIEWS):
            _write(fd, batch, offset=begin)
            flow.written(begin, end)
            batch = []
        if not batch:
            begin = end = offset
        batch.append(data)
        end += data.nbytes
    if batch:
        _write(fd, batch, offset=begin)


def _write(fd: int, batch: list[memoryview], *, offset: int) -> None:
    """Writes all views, one after another, from `offset` on."""
    written = os.pwritev(fd, batch, offset)
    for data in batch:  # continue after a short write
        if written < data.nbytes:
            write_fully(fd, data[written:], offset=offset + written)
            written = data.nbytes
        written -= data.nbytes
        offset += data.nbytes


class _Flow:
    """Starts the writeback of written bytes early, instead of at the final fsync."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begin = self._end = 0

    def written(self, begin: int, end: int) -> None:
        if begin != self._end:
            self._begin = begin
        self._end = end
        if end - self._begin >= _WRITTEN_BACK_BYTES:
            begin_writing_back(self._fd, offset=self._begin, num_bytes=end - self._begin)
            self._begin = end
