"""Time that this disk needs to write a state's bytes, by the fastest method that we have found."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import final

import numpy as np

from benchmarks.checkpoint.suite import LIMIT
from hpctrain.bench.checkpoint.methods import RAW_WRITE, MethodTime, own_seconds, remove
from hpctrain.bench.checkpoint.raw_io import RawShare
from hpctrain.checkpoint.files.direct_io import BLOCK_BYTES, open_uncached
from hpctrain.checkpoint.files.huge_pages import in_large_pages
from hpctrain.checkpoint.saving.commit import create_file
from hpctrain.comm import Collective
from hpctrain.comm.collectives.agreement import on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.storage import sync_directory

_PIECE_BYTES = 1 << 19
_THREADS = 8  # more, and larger or smaller pieces, took as long


def disk_limit(share: RawShare, *, comm: Collective, directory: Path) -> list[DiskLimit]:
    """Returns the method, or an empty list if the filesystem of `directory` has no O_DIRECT. Collective."""
    can = on_rank_0(comm, lambda: _takes_blocks(directory / "disk-limit-tried"), os_error=CheckpointError)
    return [DiskLimit(share, comm=comm, directory=directory)] if can else []


def _takes_blocks(path: Path) -> bool:
    path.touch()
    try:
        descriptor = open_uncached(path)
        if descriptor is None:
            return False
        try:
            return os.pwrite(descriptor, mmap.mmap(-1, BLOCK_BYTES), 0) == BLOCK_BYTES
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(descriptor)
    finally:
        path.unlink()


@final
class DiskLimit:
    """Writes as many bytes as a rank's share with O_DIRECT from huge pages, several writes at once, then fsync.

    The file's disk blocks are allocated before the time begins. Nothing is copied, hashed or described.
    The constructor is collective.
    """

    name, engine, raw = LIMIT, None, RAW_WRITE

    def __init__(self, share: RawShare, *, comm: Collective, directory: Path) -> None:
        self._comm, self._path = comm, directory / "disk-limit"
        self._begin, self._end = share.begin, share.end - share.end % BLOCK_BYTES
        self._file_bytes = max(map(int, comm.all_gather_bytes(b"%d" % self._end)))
        num_bytes = self._end - self._begin
        memory = in_large_pages(num_bytes) or mmap.mmap(-1, num_bytes)
        self._memory = np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
        self._memory[:] = np.random.default_rng(comm.rank).integers(0, 256, size=num_bytes, dtype=np.uint8)

    def turn(self) -> MethodTime:
        on_rank_0(self._comm, self._create, os_error=CheckpointError)
        seconds = own_seconds(self._comm, self._write)
        remove(self._path, comm=self._comm)
        return MethodTime(seconds=seconds)

    def _create(self) -> None:
        create_file(self._path, file_bytes=self._file_bytes)
        sync_directory(self._path.parent)  # including the allocation of its blocks

    def _write(self) -> None:
        descriptor = open_uncached(self._path)
        if descriptor is None:
            raise OSError(
                f"{self._path} cannot be opened with O_DIRECT, although another file in its directory could"
            )

        def write(first: int) -> None:
            piece = self._memory[first : first + _PIECE_BYTES]
            if os.pwrite(descriptor, piece.data, self._begin + first) != piece.nbytes:
                raise OSError(f"a write to {self._path} wrote fewer bytes than asked")

        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                for _ in threads.map(write, range(0, len(self._memory), _PIECE_BYTES)):
                    pass
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
