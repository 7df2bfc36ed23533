"""MPI-IO engine: what the ranks of a file have is written through MPI's own files, together where it interleaves.

Ranks write in turns (see `turns`), each with a bounded batch. Between turns all meet, so that no module's
read-modify-write of one turn meets another's of the next. What was written together is read back and compared
by its hash when it is on disk: Open MPI's collective modules report success for writes that fail (seen with 4.1.4:
EFBIG and a full disk are printed, and the call returns 0), and have written wrong bytes (ompi#12718).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.batch import Batch, Stretch, bytes_of, joined, runs_of_neighbours
from hpctrain.checkpoint.file_bytes import explained, read_fully, write_fully
from hpctrain.checkpoint.hashing import hash_of
from hpctrain.checkpoint.turns import plan_turn
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
    fd, problem = -1, None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        problem = error
    try:
        with explained(action="write", path=path), _as_checkpoint_error():
            # Opening is voted: a rank that does not see the file ends it for all.
            writer = None if files is None else files.writer(path, hints=hints)
            if problem is not None:
                raise problem
        if writer is None:
            raise CheckpointError("the engine mpio needs MPI ranks: use the engine direct")
        _Writing(path, fd, writer, batch=Batch(stretches, max_bytes=batch_bytes)).run()
    finally:
        if fd >= 0:
            os.close(fd)


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except CommunicationError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What this rank wrote in one turn together: where, shape (n,), and the hash of all of it."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    digest: str


@final
class _Writing:
    """One rank's part in the writing of one file."""

    def __init__(self, path: Path, fd: int, writer: CollectiveWriter, *, batch: Batch) -> None:
        """fd: the file, open for reading and writing."""
        self._path = path
        self._fd = fd
        self._writer = writer
        self._batch = batch
        self._shares: list[_Share] = []
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
        if self._error is None:
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
        begin, end = self._batch.reach or (-1, -1)
        table = self._writer.gather([_FAILED if self._error else _GOING_ON, begin, end])
        if (table[:, 0] == _FAILED).any() or (table[:, 1] < 0).all():
            return False
        turn = plan_turn([(int(row[1]), int(row[2])) if row[1] >= 0 else None for row in table])
        rank = self._writer.rank
        if rank in turn.alone:
            self._try(lambda: self._write_alone(self._batch.take()))
        if turn.together:
            mine = self._batch.take(until=turn.until) if rank in turn.together else []
            self._try(lambda: self._write_shared(mine))
        return True

    def _write_alone(self, stretches: list[Stretch]) -> None:
        for offset, data in joined(stretches):
            count = self._writer.write(data, offset=offset)
            if count != len(data):
                # MPI does not say what went wrong; the system does.
                count = max(count, 0)
                write_fully(self._fd, data.data[count:], offset=offset + count)

    def _write_shared(self, stretches: list[Stretch]) -> None:
        runs = list(runs_of_neighbours(stretches))
        data = bytes_of([view for _, views in runs for view in views])
        offsets = [offset for offset, _ in runs]
        lengths = [sum(view.nbytes for view in views) for _, views in runs]
        if runs:
            share = _Share(
                offsets=np.array(offsets, dtype=np.int64),
                lengths=np.array(lengths, dtype=np.int64),
                digest=hash_of(data),
            )
            self._shares.append(share)
        self._writer.write_together(data, offsets=offsets, lengths=lengths)

    def _sync(self) -> None:
        os.fsync(self._fd)

    def _compare(self) -> None:
        """Read back what was written together, through a new opening: network filesystems then look anew."""
        if not self._shares:
            return
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for share in self._shares:
                data = np.empty(int(share.lengths.sum()), dtype=np.uint8)
                places = np.concatenate([[0], np.cumsum(share.lengths)])
                parts = [
                    (offset, data[begin:end].data)
                    for offset, begin, end in zip(
                        share.offsets.tolist(), places[:-1].tolist(), places[1:].tolist(), strict=True
                    )
                ]
                for offset, part in parts:
                    read_fully(fd, part, offset=offset)
                if hash_of(data) != share.digest:
                    for offset, part in parts:
                        write_fully(fd, part, offset=offset)  # a full disk says so when written to once more
                    os.fsync(fd)
                    raise CheckpointError(
                        f"MPI reported success for bytes {parts[0][0]} to {parts[-1][0] + len(parts[-1][1]) - 1} of "
                        f"{self._path}, and others are there: use the engine direct, or another MPI file module"
                    )
        finally:
            os.close(fd)
