"""The two engines: each rank writes by itself with pwrite, or the ranks write together through MPI-IO."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

from hpctrain.checkpoint.engines.write_batch import (
    BatchExtent,
    ByteRange,
    WriteBatch,
    dealt,
    domains,
    joined,
    plan_turn,
)
from hpctrain.checkpoint.files.direct_io import Staging, begin_writing_back, open_uncached, write_uncached
from hpctrain.checkpoint.files.io_errors import explained
from hpctrain.checkpoint.files.lustre_striping import PAGE_BYTES
from hpctrain.comm import Collective, CollectiveFiles, CollectiveWriter
from hpctrain.errors import CheckpointError, CommunicationError
from hpctrain.storage import write_fully

# Direct engine: every rank writes its bytes to their positions in the file with pwrite, without MPI.
#
# Works on any POSIX filesystem that all ranks share. Contiguous byte ranges are written by one call.


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
    """Writes this rank's byte ranges to the existing file at `path` and flushes them to disk. Not collective.

    Writeback starts early, so that the fsync at the end is short.

    Args:
        path: The file.
        byte_ranges: The content, as pairs of file offset and bytes.
        structure: Further byte ranges, which will soon be read back and are therefore written through the page
            cache.
        bypass_cache: Write `byte_ranges` past the page cache, if the filesystem supports it.
        staging: Provides the memory in which small byte ranges are joined.

    Raises:
        CheckpointError: If the file cannot be written.
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
    """Writes the views in `batch`, one after another, at file offset `offset`. Continues after a short write."""
    written = os.pwritev(fd, batch, offset)
    for data in batch:  # continue after a short write
        if written < data.nbytes:
            write_fully(fd, data[written:], offset=offset + written)
            written = data.nbytes
        written -= data.nbytes
        offset += data.nbytes


class _Flow:
    """Makes the kernel write bytes to disk soon after they were written to the file, not only at the final fsync."""

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


# MPI-IO engine: the ranks of a file write through MPI-IO, in large contiguous pieces (two-phase I/O).
#
# The ranks write in turns (see `write_batch`), each a batch of bounded size. Small interleaving pieces
# are first sent to the rank that writes their part of the file, which joins them. The exchange is our own,
# since MPI's collective writes cannot be made to fail on all ranks (see
# `hpctrain.comm.interface.collective_files`).


BATCH_BYTES = 32 << 20
# Data sieving (ROMIO) turns small writes into read-modify-write of bytes that other ranks write.
HINTS: Mapping[str, str] = {"romio_ds_write": "disable"}
_FAILED, _GOING_ON = 1, 0


class _Files(dict[tuple[tuple[int, ...], ...], CollectiveFiles | None]):
    """Cache of the objects that open MPI files, for one communicator: one for each division of its ranks into groups.

    The object is for this rank's group of the division. A division is a tuple of groups of world ranks. The same group
    may occur in several divisions.
    """


def obstacle_to_mpio(comm: Collective) -> str | None:
    """Returns the reason why this rank cannot use the engine `mpio`, or None if it can. Not collective."""
    if comm.backend not in ("mpi", "horovod"):
        return f"the {comm.backend} backend has no MPI ranks"
    return None


def files_of(comm: Collective, *, groups: Sequence[Sequence[int]] | None = None) -> CollectiveFiles | None:
    """Returns the object that opens MPI files for this rank and the ranks that write to the same file.

    Returns None without MPI. `groups` contains the world ranks that write to each file; None: all ranks write to one
    file. The first call with these `groups`, which must be the same on every rank, is collective over `comm` and
    creates the object. Later calls return the same object, which is kept as long as `comm`.
    """
    key = (tuple(comm.members),) if groups is None else tuple(map(tuple, groups))
    known = comm.attribute(_Files)
    if key not in known:
        known[key] = comm.collective_files(members=own_group(comm, groups=groups))
    return known[key]


def own_group(comm: Collective, *, groups: Sequence[Sequence[int]] | None) -> tuple[int, ...]:
    """Returns the world ranks that write to the same file as this rank. Pure.

    `groups` contains the world ranks that write to each file; None: all ranks of `comm` write to one file.
    """
    mine = comm.members[comm.rank]
    return tuple(comm.members) if groups is None else next(tuple(group) for group in groups if mine in group)


def write_collectively(
    path: Path,
    byte_ranges: Iterable[ByteRange],
    *,
    comm: Collective,
    groups: Sequence[Sequence[int]] | None = None,
    hints: Mapping[str, str] = HINTS,
    batch_bytes: int = BATCH_BYTES,
    block_bytes: int = PAGE_BYTES,
) -> None:
    """Writes this rank's byte ranges to the existing file at `path` through MPI-IO and flushes them to disk.

    The first call with these `groups` is collective over `comm`; later calls are collective over this rank's group.
    A rank that fails reports this to the others, and all stop, so that no rank hangs.

    Args:
        path: The file.
        byte_ranges: Pairs of file offset and bytes, perhaps none. They must not overlap, on one rank or between
            ranks; ascending offsets are fastest. The bytes must not change until the call returns.
        comm: All ranks of the save.
        groups: World ranks that write to each file, every rank in one group; the same on every rank. None: all
            ranks write to one file.
        hints: MPI-IO hints, the same on all ranks of a group. cb_nodes limits the number of ranks to which small
            pieces are sent.
        batch_bytes: Maximum number of bytes that a rank holds at a time.
        block_bytes: The filesystem's unit of locking, to which the ranks' parts of the file are aligned.

    Raises:
        CheckpointError: On the ranks that fail, or on all if the file cannot be opened; the caller must exchange
            the outcome.
    """
    files = files_of(comm, groups=groups)
    num_ranks = len(own_group(comm, groups=groups))
    try:
        writer = None if files is None else files.writer(path, hints=hints)
    except CommunicationError as error:
        # Opening fails on all ranks together. A rank that cannot open the file itself reports its own reason.
        with explained(action="write", path=path):
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        raise CheckpointError(str(error)) from error
    if writer is None and num_ranks == 1:
        write_direct(path, byte_ranges)
        return
    if writer is None:
        raise CheckpointError("the engine mpio needs MPI ranks: use the engine direct")
    _Writing(
        path, writer, batch=WriteBatch(byte_ranges, max_bytes=batch_bytes), block_bytes=block_bytes,
        num_writers=int(hints.get("cb_nodes", num_ranks)),
    ).run()  # fmt: skip


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except CommunicationError as error:
        raise CheckpointError(str(error)) from error


@final
class _Writing:
    """This rank's part in writing one file through MPI-IO, together with the other ranks of the file."""

    def __init__(
        self, path: Path, writer: CollectiveWriter, *, batch: WriteBatch, num_writers: int, block_bytes: int
    ) -> None:
        self._path = path
        self._writer = writer
        self._batch = batch
        self._num_writers = num_writers
        self._block_bytes = block_bytes
        self._error: Exception | None = None

    def run(self) -> None:
        """Writes all bytes. Collective over the ranks that write to the file. Raises the first error of this rank."""
        # The ranks' hints may differ if a network filesystem reported different file sizes to them.
        counts = self._writer.gather([self._num_writers])
        self._num_writers = min(int(counts.max()), len(counts))
        while self._take_turn():
            pass
        self._try(self._writer.sync)
        self._try(self._sync)
        self._try(self._writer.close)
        if self._error is not None:
            raise self._error

    def _try(self, function: Callable[[], None]) -> None:
        """Calls `function` and keeps an error for later, since this rank must take part in the next collective step."""
        try:
            with explained(action="write", path=self._path), _as_checkpoint_error():
                function()
        except Exception as error:
            self._error = self._error or error

    def _take_turn(self) -> bool:
        """Writes bytes of this rank's current batch together with the other ranks of the file. Collective.

        Returns False if everything is written or a rank has failed.
        """
        self._try(self._batch.fill)
        reach = self._batch.reach
        mine = (reach.begin, reach.end, reach.num_pieces, reach.num_bytes) if reach else (-1, -1, 0, 0)
        table = self._writer.gather([_FAILED if self._error else _GOING_ON, *mine]).tolist()
        if any(row[0] == _FAILED for row in table) or all(row[1] < 0 for row in table):
            return False
        reaches = [
            BatchExtent(begin=begin, end=end, num_pieces=num_pieces, num_bytes=num_bytes)
            if begin >= 0
            else None
            for _, begin, end, num_pieces, num_bytes in table
        ]
        # No rank receives more bytes than its own batch may hold.
        turn = plan_turn(reaches, max_span=self._num_writers * self._batch.max_bytes)
        rank = self._writer.rank
        if rank in turn.alone:
            self._try(lambda: self._write(self._batch.take()))
        if turn.together:
            places = domains(
                begin=turn.begin, until=turn.until, num_ranks=len(table), num_writers=self._num_writers,
                block_bytes=self._block_bytes,
            )  # fmt: skip
            given = self._batch.take(until=turn.until) if rank in turn.together else []
            outgoing = dealt(given, places=places)
            self._try(lambda: self._write(sorted(self._writer.exchange(outgoing), key=_offset_of)))
        return True

    def _write(self, byte_ranges: list[ByteRange]) -> None:
        for offset, data in joined(byte_ranges):
            count = self._writer.write(data, offset=offset)
            if count != len(data):
                # MPI does not report the reason of a short write: write the rest through the system, which does.
                count = max(count, 0)
                with self._opened() as fd:
                    write_fully(fd, data.data[count:], offset=offset + count)

    def _sync(self) -> None:
        with self._opened() as fd:
            os.fsync(fd)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Yields a file descriptor for writes that bypass MPI."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def _offset_of(byte_range: ByteRange) -> int:
    return byte_range[0]
