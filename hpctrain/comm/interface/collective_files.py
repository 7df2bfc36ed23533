"""Collective reading and writing of files through MPI-IO, which merges many small requests into few large requests.

A collective write is two-phase I/O: the ranks exchange their data, and then each writes large extents. The MPI backend
passes the module and the communicator; nothing here imports mpi4py.

Source: R. Thakur, W. Gropp, E. Lusk, "Data Sieving and Collective I/O in ROMIO", Frontiers 1999.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import CommunicationError


@runtime_checkable
class CollectiveWriter(Protocol):
    """One file that all ranks of a group have opened for writing together.

    A writer is used by one thread, and all ranks call the collective methods in the same order. MPI's own collective
    writes are not used: if a write fails, modules of Open MPI return success or leave the other ranks waiting forever
    (module two_phase of Open MPI 4.1.4), and some have written wrong bytes (ompi#12718).
    """

    @property
    def rank(self) -> int:
        """This rank's index in the group, from 0."""

    def gather(self, mine: Sequence[int]) -> NDArray[np.int64]:
        """Gathers integers: returns every rank's `mine`, shape (num_ranks, len(mine)). Collective.

        `mine` has the same length on every rank.
        """

    def write(self, data: NDArray[np.uint8], *, offset: int) -> int:
        """Writes `data`, shape (n,), at byte `offset`. Not collective.

        Returns the number of bytes written, as MPI reports it, and 0 if MPI reports an error. Fewer than n bytes mean
        an error or a full disk, which MPI libraries report in different ways.
        """

    def exchange(self, outgoing: Sequence[Sequence[tuple[int, memoryview]]]) -> list[tuple[int, memoryview]]:
        """Sends each rank the extents that it is to write, and returns the extents that were sent to this rank.

        Collective.

        outgoing: for each rank of the group, a list of extents (offset in the file, bytes), possibly empty; less than
        2 GiB in all.
        """

    def sync(self) -> None:
        """Flushes the written data to the disk (MPI_File_sync). Collective."""

    def close(self) -> None:
        """Closes the file. Collective."""


def _can_write(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


@final
class MpiCollectiveWriter:
    """`CollectiveWriter` over MPI-IO."""

    def __init__(self, mpi: Any, comm: Any, *, path: Path, hints: Mapping[str, str]) -> None:
        """Opens the existing file. Collective over `comm`.

        mpi: the module mpi4py.MPI.
        hints: hints for MPI_File_open, the same on every rank; unknown ones are ignored.

        Raises CommunicationError on every rank if one of them does not see the file or may not write to the file, and
        on this rank if MPI reports a failure.
        """
        self._mpi = mpi
        self._comm = comm
        self._path = path
        # MPI_File_open does not always fail on all ranks alike: check first.
        unseen = [place for place, row in enumerate(self.gather([int(_can_write(path))])) if not row[0]]
        if unseen:
            raise CommunicationError(
                f"{path} cannot be opened for writing on {len(unseen)} of the {comm.Get_size()} ranks of its group; "
                f"the first is rank {unseen[0]} of the group"
            )
        info = mpi.Info.Create()
        try:
            for name, value in hints.items():
                info.Set(name, value)
            with self._reported("opening"):
                self._file = mpi.File.Open(comm, str(path), mpi.MODE_WRONLY, info)
        finally:
            info.Free()

    @property
    def rank(self) -> int:
        return int(self._comm.Get_rank())

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise CommunicationError(
                f"{operation} {self._path} on rank {self._comm.Get_rank()} of its group: MPI reported {error}"
            ) from error

    def gather(self, mine: Sequence[int]) -> NDArray[np.int64]:
        row = np.array(mine, dtype=np.int64)
        found = np.empty((self._comm.Get_size(), len(row)), dtype=np.int64)
        with self._reported("writing"):
            self._comm.Allgather(row, found)
        return found

    def write(self, data: NDArray[np.uint8], *, offset: int) -> int:
        status = self._mpi.Status()
        try:
            self._file.Write_at(offset, [data, self._mpi.BYTE], status)
        except self._mpi.Exception:
            return 0  # Open MPI 5 and ROMIO report a full disk so, without the system's reason
        return int(status.Get_count(self._mpi.BYTE))

    def exchange(self, outgoing: Sequence[Sequence[tuple[int, memoryview]]]) -> list[tuple[int, memoryview]]:
        places = np.array(
            [(offset, view.nbytes) for part in outgoing for offset, view in part], dtype=np.int64
        ).reshape(-1, 2)
        data = np.frombuffer(b"".join(view for part in outgoing for _, view in part), dtype=np.uint8)
        sent = np.array(
            [(2 * len(part), sum(view.nbytes for _, view in part)) for part in outgoing], np.int32
        )
        taken = np.empty_like(sent)  # (num_ranks, 2): numbers of `places`, and bytes
        with self._reported("writing"):
            self._comm.Alltoall(sent, taken)
            found = np.empty((int(taken[:, 0].sum()) // 2, 2), dtype=np.int64)
            content = np.empty(int(taken[:, 1].sum()), dtype=np.uint8)
            self._comm.Alltoallv([places, sent[:, 0].tolist()], [found, taken[:, 0].tolist()])
            self._comm.Alltoallv([data, sent[:, 1].tolist()], [content, taken[:, 1].tolist()])
        ends = np.cumsum(found[:, 1]).tolist()
        view = content.data
        return [
            (offset, view[end - length : end])
            for (offset, length), end in zip(found.tolist(), ends, strict=True)
        ]

    def sync(self) -> None:
        with self._reported("writing"):
            self._file.Sync()

    def close(self) -> None:
        with self._reported("closing"):
            self._file.Close()


# Collective reading and writing of files through MPI-IO, which merges many small requests into few large
# ones.


_MAX_OPEN = 32
# Open MPI 4.1.4's default module (vulcan) returns wrong bytes, without an error, where the ranks' requests differ in
# number: seen on 3 ranks of one node. The other modules read correctly. The wrong ones are excluded instead of choosing
# a correct one, because Open MPI 5 has no `two_phase`, and opens no file at all if a chosen name is unknown, while an
# unknown excluded name is allowed. MPI reads the variable when it opens the first file.
_SOUND_MODULES = ("OMPI_MCA_fcoll", "^vulcan,dynamic,dynamic_gen2")
# hpctrain uses no shared file pointers, yet setting a view opens the module that keeps them. `lockedfile` keeps them in
# an extra file that all ranks create at once: on GlusterFS some then fail with ESTALE, and MPI waits forever.
_NO_LOCKED_FILE = ("OMPI_MCA_sharedfp", "^lockedfile")


@runtime_checkable
class CollectiveFiles(Protocol):
    """Files that all ranks of a group read or write together.

    The object is used by one thread at a time, and all ranks call the methods in the same order.
    """

    def read(
        self, path: Path, *, offsets: Sequence[int], lengths: Sequence[int], out: NDArray[np.uint8]
    ) -> None:
        """Reads byte ranges of a file into `out`, a uint8 array of shape (sum(lengths),). Collective.

        Every rank passes the same path and its own byte ranges: ascending, without overlap, less than 2 GiB in all,
        possibly none. The ranges must lie inside the file, because MPI does not reliably report a short read. Raises
        CommunicationError if the read fails.
        """

    def writer(self, path: Path, *, hints: Mapping[str, str]) -> CollectiveWriter | None:
        """Opens an existing file for collective writing; returns None if the backend has no MPI. Collective.

        Every rank passes the same path and the same hints for MPI. Do not read from `path` through this object before
        the writer is closed. Raises CommunicationError if MPI reports a failure.
        """

    def close(self) -> None:
        """Closes the files. Collective."""


@final
class MpiCollectiveFiles:
    """`CollectiveFiles` over MPI-IO."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        """Creates the object.

        mpi: the module mpi4py.MPI.
        comm: communicator of the group, used by this object only.
        """
        self._mpi = mpi
        self._comm = comm
        self._open: OrderedDict[Path, Any] = OrderedDict()
        os.environ.setdefault(*_SOUND_MODULES)
        os.environ.setdefault(*_NO_LOCKED_FILE)

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise CommunicationError(
                f"{operation} on rank {self._comm.Get_rank()}: MPI reported {error}"
            ) from error

    def _file(self, path: Path) -> Any:
        # All ranks open the same files in the same order, so they also close the same one.
        file = self._open.pop(path, None)
        if file is None:
            file = self._mpi.File.Open(self._comm, str(path), self._mpi.MODE_RDONLY)
        self._open[path] = file
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)[1].Close()
        return file

    def read(
        self, path: Path, *, offsets: Sequence[int], lengths: Sequence[int], out: NDArray[np.uint8]
    ) -> None:
        mpi = self._mpi
        with self._reported(f"reading {path} collectively"):
            file = self._file(path)
            byte_ranges = None
            if len(offsets):
                # This rank's view of the file: its byte ranges, concatenated.
                byte_ranges = mpi.BYTE.Create_hindexed(list(lengths), list(offsets)).Commit()
            file.Set_view(0, mpi.BYTE, byte_ranges or mpi.BYTE)
            file.Read_at_all(0, [out, mpi.BYTE])
            if byte_ranges is not None:
                byte_ranges.Free()

    def writer(self, path: Path, *, hints: Mapping[str, str]) -> CollectiveWriter:
        return MpiCollectiveWriter(self._mpi, self._comm, path=path, hints=hints)

    def close(self) -> None:
        with self._reported("closing files"):
            for file in self._open.values():
                file.Close()
            self._open.clear()
            self._comm.Free()


@final
class LocalFiles:
    """`CollectiveFiles` for ranks in one process: each rank reads independently, and there is no collective writing."""

    def read(
        self, path: Path, *, offsets: Sequence[int], lengths: Sequence[int], out: NDArray[np.uint8]
    ) -> None:
        place = 0
        try:
            with path.open("rb", buffering=0) as file:
                for offset, length in zip(offsets, lengths, strict=True):
                    file.seek(offset)
                    while length:
                        count = file.readinto(out[place : place + length].data)
                        if not count:
                            raise OSError("the file ends before the end of the requested byte range")
                        place += count
                        length -= count
        except OSError as error:
            raise CommunicationError(f"reading {path}: {error}") from error

    def writer(self, path: Path, *, hints: Mapping[str, str]) -> None:
        """Returns None: collective writing needs MPI."""
        return

    def close(self) -> None:
        """Does nothing: no file stays open."""
