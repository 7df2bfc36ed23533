"""Direct engine: every rank writes its bytes at their places with pwrite.

Works on any POSIX filesystem that all ranks see, without MPI. What follows each other in the file is one call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from hpctrain.checkpoint.files.direct_io import open_uncached, write_uncached
from hpctrain.checkpoint.files.full_io import explained, write_fully
from hpctrain.checkpoint.files.syscalls import begin_writing_back
from hpctrain.checkpoint.files.write_buffers import Staging

# A batch small enough to be in the processor's cache still, where hashing has just brought it.
_BATCH_BYTES = 1 << 20
_MAX_VIEWS = 512  # the least that systems allow in one call is 1024
_WRITTEN_BACK_BYTES = 8 << 20
_LONG_STRUCTURE_BYTES = 1 << 20  # shorter ones are left to the flush at the end


def write_direct(
    path: Path,
    stretches: Iterable[tuple[int, memoryview]],
    *,
    structure: Iterable[tuple[int, memoryview]] = (),
    bypass_cache: bool = False,
    staging: Staging | None = None,
) -> None:
    """Write this rank's stretches, (offset, bytes), of the file at `path`, which is there. On disk (fsync) when it
    returns. Not collective.

    The disk works while this goes on, so that no long flush comes at the end. bypass_cache: past the page cache, where
    the filesystem can; but not structure, which is read back soon. staging: where stretches may be joined. Raises
    CheckpointError.
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
            _write_cached(fd, stretches)
        else:
            opened.callback(os.close, uncached)
            write_uncached(fd, uncached, stretches, staging=staging or Staging())
        os.fsync(fd)


def _write_cached(fd: int, stretches: Iterable[tuple[int, memoryview]]) -> None:
    batch: list[memoryview] = []
    begin = end = 0
    flow = _Flow(fd)
    for offset, data in stretches:
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
    """All of the views, one after the other from `offset` on."""
    written = os.pwritev(fd, batch, offset)
    for data in batch:  # a short write is gone on with from where it ended
        if written < data.nbytes:
            write_fully(fd, data[written:], offset=offset + written)
            written = data.nbytes
        written -= data.nbytes
        offset += data.nbytes


class _Flow:
    """Has the disk work from the first bytes on, not from the flush at the end."""

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
