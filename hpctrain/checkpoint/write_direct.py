"""Direct engine: every rank writes its bytes at their places with pwrite.

Works on any POSIX filesystem that all ranks see, without MPI. What follows each other in the file is one call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from hpctrain.checkpoint.disk import begin_writing_back
from hpctrain.checkpoint.file_bytes import explained, write_fully

# A batch small enough to be in the processor's cache still, where hashing has just brought it.
_BATCH_BYTES = 1 << 20
_MAX_VIEWS = 512  # the least that systems allow in one call is 1024
_WRITTEN_BACK_BYTES = 8 << 20


def write_direct(
    path: Path, stretches: Iterable[tuple[int, memoryview]], *, limit_bytes_per_s: float | None = None
) -> None:
    """Write this rank's stretches, (offset, bytes), of the file at `path`, which is there. On disk (fsync) when it
    returns. Not collective.

    The disk begins to work while this goes on, so that no long flush comes at the end. limit_bytes_per_s: this rank
    takes no more of it. Raises CheckpointError.
    """
    with explained(action="write", path=path):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            batch: list[memoryview] = []
            begin = end = 0
            flow = _Flow(fd) if limit_bytes_per_s is None else _Pace(fd, limit_bytes_per_s)
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
            os.fsync(fd)
        finally:
            os.close(fd)


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


class _Pace(_Flow):
    """Keeps a rank below so many bytes a second."""

    def __init__(self, fd: int, limit_bytes_per_s: float) -> None:
        super().__init__(fd)
        self._limit = limit_bytes_per_s
        self._begin_s = time.monotonic()
        self._bytes = 0

    def written(self, begin: int, end: int) -> None:
        super().written(begin, end)
        self._bytes += end - begin
        ahead_s = self._bytes / self._limit - (time.monotonic() - self._begin_s)
        if ahead_s > 0:
            time.sleep(ahead_s)
