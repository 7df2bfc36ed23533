"""MPI-IO engine: what the ranks of a file have is written through MPI's files, in large pieces.

Ranks write in turns (see `turns`), each with a bounded batch. Small pieces that interleave are first brought to the
rank that writes that part of the file, all that lies there in one. The exchange is ours and not MPI's collective
writing, which cannot be told to fail on all ranks (see `hpctrain.comm.interface.collective_writer`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final
from weakref import WeakKeyDictionary

from hpctrain.checkpoint.engines.posix_engine import write_direct
from hpctrain.checkpoint.engines.two_phase_plan import BatchExtent, dealt, domains, plan_turn
from hpctrain.checkpoint.engines.write_batch import ByteRange, WriteBatch, joined
from hpctrain.checkpoint.files.full_io import explained, write_fully
from hpctrain.checkpoint.files.lustre_striping import PAGE_BYTES
from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.collective_writer import CollectiveWriter
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CheckpointError, CommunicationError

BATCH_BYTES = 32 << 20
# Data sieving turns small writes into read-modify-write of what other ranks write (ROMIO).
HINTS: Mapping[str, str] = {"romio_ds_write": "disable"}
_FAILED, _GOING_ON = 1, 0

# By how all ranks are grouped, not by a rank's own group: that one may be the same where the others' are not.
_opened: WeakKeyDictionary[Collective, dict[tuple[tuple[int, ...], ...], CollectiveFiles | None]] = (
    WeakKeyDictionary()
)


def obstacle_to_mpio(comm: Collective) -> str | None:
    """Why this rank cannot use the engine; None when nothing is known against it. Does not communicate."""
    if comm.backend not in ("mpi", "horovod"):
        return f"the {comm.backend} backend has no MPI ranks"
    return None


def files_of(comm: Collective, *, groups: Sequence[Sequence[int]] | None = None) -> CollectiveFiles | None:
    """The files of this rank's group, opened once and kept as long as `comm`; None where MPI is not there.
    Collective over `comm` the first time; every rank asks for the same groups in the same order."""
    key = (tuple(comm.members),) if groups is None else tuple(map(tuple, groups))
    known = _opened.setdefault(comm, {})
    if key not in known:
        known[key] = comm.collective_files(members=own_group(comm, groups=groups))
    return known[key]


def own_group(comm: Collective, *, groups: Sequence[Sequence[int]] | None) -> tuple[int, ...]:
    """World ranks of this rank's group; with no groups, all of `comm`. Pure."""
    mine = comm.members[comm.rank]
    return tuple(comm.members) if groups is None else next(tuple(group) for group in groups if mine in group)


def write_together(
    path: Path,
    stretches: Iterable[ByteRange],
    *,
    comm: Collective,
    groups: Sequence[Sequence[int]] | None = None,
    hints: Mapping[str, str] = HINTS,
    batch_bytes: int = BATCH_BYTES,
    block_bytes: int = PAGE_BYTES,
) -> None:
    """Write this rank's `stretches` of the file at `path`, which is there. On disk (fsync) when it returns.

    groups: of world ranks, each with a file of its own, all ranks in one of them, the same on every rank; None: all
    of `comm` share one file. Collective over `comm` the first time, then over the group; a rank may have no stretches.
    stretches: do not overlap, on one rank or between ranks; ascending is fastest. Views must keep their bytes
    until the call returns. hints: for MPI, the same in all of a group; cb_nodes also says how many ranks small pieces
    are brought to, else all. block_bytes: a filesystem's unit of locking, where their parts of the file meet.
    CheckpointError on the ranks that met an error, on all where the file cannot be opened: the caller votes. Nothing
    hangs: a rank that fails says so to the others, and all stop.
    """
    files = files_of(comm, groups=groups)
    num_ranks = len(own_group(comm, groups=groups))
    try:
        writer = None if files is None else files.writer(path, hints=hints)
    except CommunicationError as error:
        # Opening is voted, so all ranks come here; the one that does not see the file knows best why.
        with explained(action="write", path=path):
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        raise CheckpointError(str(error)) from error
    if writer is None and num_ranks == 1:
        write_direct(path, stretches)  # nobody to write together with
        return
    if writer is None:
        raise CheckpointError("the engine mpio needs MPI ranks: use the engine direct")
    _Writing(
        path, writer, batch=WriteBatch(stretches, max_bytes=batch_bytes), block_bytes=block_bytes,
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
    """One rank's part in the writing of one file."""

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
        """Raises what this rank met."""
        # Also where a network filesystem has told some ranks another size, and so other hints.
        told = self._writer.gather([self._num_writers])
        self._num_writers = min(int(told.max()), len(told))
        while self._take_turn():
            pass
        self._try(self._writer.sync)
        self._try(self._sync)
        self._try(self._writer.close)
        if self._error is not None:
            raise self._error

    def _try(self, function: Callable[[], None]) -> None:
        """A bug is caught like any error: the others wait for this rank in the next collective step."""
        try:
            with explained(action="write", path=self._path), _as_checkpoint_error():
                function()
        except Exception as error:
            self._error = self._error or error

    def _take_turn(self) -> bool:
        """Write what can be written now, with all other ranks; whether anything may be left. Collective."""
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
        # A rank gets no more of the others' bytes than it holds of its own.
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

    def _write(self, stretches: list[ByteRange]) -> None:
        for offset, data in joined(stretches):
            count = self._writer.write(data, offset=offset)
            if count != len(data):
                # MPI does not say what went wrong; the system does.
                count = max(count, 0)
                with self._opened() as fd:
                    write_fully(fd, data.data[count:], offset=offset + count)

    def _sync(self) -> None:
        with self._opened() as fd:
            os.fsync(fd)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file past MPI."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def _offset_of(stretch: ByteRange) -> int:
    return stretch[0]
