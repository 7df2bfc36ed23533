"""MPI-IO engine: what the ranks of a file have is written through MPI's own files, together where it interleaves.

Ranks write in turns (see `turns`), each with a bounded batch. Between turns all meet, so that no module's
read-modify-write of one turn meets another's of the next. Where anything was written together, all is read back
and compared by its hash when it is on disk: Open MPI's collective modules report success for writes that fail
(seen with 4.1.4: it prints the error, and the call returns MPI_SUCCESS), and have written wrong bytes (ompi#12718).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, final
from weakref import WeakKeyDictionary

import xxhash

from hpctrain.checkpoint.batch import Batch, Stretch, bytes_of, joined, runs_of_neighbours
from hpctrain.checkpoint.file_bytes import explained, read_fully, write_fully
from hpctrain.checkpoint.turns import Reach, plan_turn
from hpctrain.comm.collective_files import CollectiveFiles
from hpctrain.comm.collective_writing import CollectiveWriter
from hpctrain.comm.communicator import Collective
from hpctrain.errors import CheckpointError, CommunicationError

BATCH_BYTES = 32 << 20
# Data sieving turns small writes into read-modify-write of what other ranks write (ROMIO).
HINTS: Mapping[str, str] = {"romio_ds_write": "disable"}
# Open MPI's modules with wrong bytes or hangs behind them: ompi#12718, ompi#7414, ompi#10297.
_BAD_MODULES = ("vulcan", "dynamic")
_FCOLL = "OMPI_MCA_fcoll"
_FAILED, _GOING_ON = 1, 0

_opened: WeakKeyDictionary[Collective, dict[tuple[int, ...], CollectiveFiles | None]] = WeakKeyDictionary()


def obstacle_to_mpio(comm: Collective, *, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why this rank cannot use the engine; None when nothing is known against it. Does not communicate."""
    if comm.backend not in ("mpi", "horovod"):
        return f"the {comm.backend} backend has no MPI ranks"
    asked = environ.get(_FCOLL, "")
    named = [name.strip() for name in asked.split(",")]
    bad = [name for name in _BAD_MODULES if name in named]
    if bad and not asked.startswith("^"):
        return (
            f"{_FCOLL}={asked} allows the module {bad[0]}, which has written wrong bytes: unset it, or set "
            "two_phase,individual"
        )
    return None


def files_of(comm: Collective, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
    """The group's files, opened once and kept as long as `comm`; None where MPI is not there. Collective over
    `comm` the first time; every rank asks for the same groups in the same order."""
    ranks = comm.members if members is None else tuple(members)
    known = _opened.setdefault(comm, {})
    if ranks not in known:
        known[ranks] = comm.collective_files(members=ranks)
    return known[ranks]


def write_together(
    path: Path,
    stretches: Iterable[Stretch],
    *,
    comm: Collective,
    members: Sequence[int] | None = None,
    hints: Mapping[str, str] = HINTS,
    batch_bytes: int = BATCH_BYTES,
) -> None:
    """Write this rank's `stretches` of the file at `path`, which is there. On disk (fsync) when it returns.

    members: the world ranks that share the file, this one among them; None: all of `comm`. Collective over
    `comm` (each rank with its own file) the first time, then over `members`; a rank may have no stretches.
    stretches: do not overlap, on one rank or between ranks; ascending is fastest. Views must keep their bytes
    until the call returns. hints: for MPI, the same on all members.
    CheckpointError on every rank that met an error, its own or a group's; what another rank alone met this one
    does not raise: the caller votes. Nothing hangs: a rank that fails says so to the others.
    """
    files = files_of(comm, members=members)
    try:
        writer = None if files is None else files.writer(path, hints=hints)
    except CommunicationError as error:
        # Opening is voted, so all ranks come here; the one that does not see the file knows best why.
        with explained(action="write", path=path):
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        raise CheckpointError(str(error)) from error
    if writer is None:
        raise CheckpointError("the engine mpio needs MPI ranks: use the engine direct")
    _Writing(path, writer, batch=Batch(stretches, max_bytes=batch_bytes)).run()


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except CommunicationError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What this rank wrote at one time: where, and the hash of all of it."""

    offsets: list[int]
    lengths: list[int]
    digest: int


def _share_of(stretches: Sequence[Stretch]) -> _Share:
    hashing = xxhash.xxh3_64()
    offsets, lengths = [], []
    for offset, views in runs_of_neighbours(stretches):
        offsets.append(offset)
        lengths.append(sum(view.nbytes for view in views))
        for view in views:
            hashing.update(view)
    return _Share(offsets=offsets, lengths=lengths, digest=hashing.intdigest())


@final
class _Writing:
    """One rank's part in the writing of one file."""

    def __init__(self, path: Path, writer: CollectiveWriter, *, batch: Batch) -> None:
        self._path = path
        self._writer = writer
        self._batch = batch
        self._shares: list[_Share] = []
        self._any_together = False
        self._error: Exception | None = None

    def run(self) -> None:
        """Raises what this rank met."""
        while self._take_turn():
            pass
        self._writer.sync()
        self._try(self._sync)
        # From here on every rank's bytes are on the servers, and another node's can be read.
        self._writer.gather([_FAILED if self._error else _GOING_ON])
        self._writer.close()
        if self._error is None and self._any_together:
            self._try(self._compare)
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
        turn = plan_turn(
            [
                Reach(begin=begin, end=end, num_pieces=num_pieces, num_bytes=num_bytes)
                if begin >= 0
                else None
                for _, begin, end, num_pieces, num_bytes in table
            ]
        )
        rank = self._writer.rank
        if rank in turn.alone:
            self._try(lambda: self._write_alone(self._batch.take()))
        if turn.together:
            self._any_together = True
            if turn.alone:
                self._writer.gather([_GOING_ON])  # what is written together may read, and write back, between
            taken = self._batch.take(until=turn.until) if rank in turn.together else []
            self._try(lambda: self._write_shared(taken))
        return True

    def _write_alone(self, stretches: list[Stretch]) -> None:
        self._shares.append(_share_of(stretches))
        for offset, data in joined(stretches):
            count = self._writer.write(data, offset=offset)
            if count != len(data):
                # MPI does not say what went wrong; the system does.
                count = max(count, 0)
                with self._opened() as fd:
                    write_fully(fd, data.data[count:], offset=offset + count)

    def _write_shared(self, stretches: list[Stretch]) -> None:
        share = _share_of(stretches)
        if stretches:
            self._shares.append(share)
        data = bytes_of([view for _, view in stretches])
        self._writer.write_together(data, offsets=share.offsets, lengths=share.lengths)

    def _sync(self) -> None:
        with self._opened() as fd:
            os.fsync(fd)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The file anew, past MPI: network filesystems then look at what others have written."""
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _compare(self) -> None:
        """Read back what this rank has written."""
        with self._opened() as fd:
            for share in self._shares:
                data = bytearray(sum(share.lengths))
                ends = itertools.accumulate(share.lengths)
                parts = [
                    (offset, memoryview(data)[end - length : end])
                    for offset, length, end in zip(share.offsets, share.lengths, ends, strict=True)
                ]
                for offset, part in parts:
                    read_fully(fd, part, offset=offset)
                if xxhash.xxh3_64_intdigest(data) != share.digest:
                    self._explain_damage(fd, parts)

    def _explain_damage(self, fd: int, parts: list[tuple[int, memoryview]]) -> NoReturn:
        for offset, part in parts:
            write_fully(fd, part, offset=offset)  # a full disk says so to whom it asks directly
        os.fsync(fd)
        (first, _), (last, view) = parts[0], parts[-1]
        raise CheckpointError(
            f"MPI reported success for bytes {first} to {last + view.nbytes - 1} of {self._path}, and others are "
            "there: is the disk full? Else use the engine direct, or another file module of MPI"
        )
