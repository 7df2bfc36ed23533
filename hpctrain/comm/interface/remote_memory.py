"""Memory of each rank that every other rank can read and write without its participation: MPI's one-sided operations.

The MPI backend passes the module and the communicator; nothing here imports mpi4py.

Source: MPI 3.1 standard, sections 11.2.2 (MPI_Win_allocate), 11.3.4 (MPI_Fetch_and_op), 11.4 (the unified memory
model), and 11.5.3 (passive target, MPI_Win_lock_all).
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import CommunicationError

# Open MPI and MPICH keep windows here on Linux; they unlink the files at once, so a killed run leaves none.
SHARED_MEMORY = Path("/dev/shm")
# MPI counts are 32-bit: longer reads are split.
_PIECE_BYTES = 1 << 30


@runtime_checkable
class RemoteMemory(Protocol):
    """One rank's access to memory that is distributed over all ranks.

    Memory that is only read: each rank writes to `local`, then all ranks call `publish`, and then call `get`.

    Memory that changes: ranks also call `put`, `store` and `fetch_add`, and write to `local`. A `get` of bytes that
    change meanwhile may return old bytes and new ones; the callers must find out, for example by version numbers. An
    aligned integer of 8 bytes is never torn. `sync` orders accesses to `local`.

    Several threads may call the methods.
    """

    @property
    def local(self) -> NDArray[np.uint8]:
        """This rank's part, shape (num_bytes,), at first with any content. Must not be used after `close`."""

    def publish(self) -> None:
        """Makes what each rank has written to its `local` readable on all ranks. Collective."""

    def get(self, rank: int, *, offset: int, out: NDArray[np.uint8]) -> None:
        """Starts copying n bytes from the part of `rank`, from byte `offset` on, into `out`. Not collective.

        out: contiguous array of shape (n,). It is filled only after `flush`.

        The other rank does not take part in the copy.
        """

    def flush(self) -> None:
        """Waits until all copies that this rank has started are complete. Not collective."""

    def put(self, rank: int, *, offset: int, data: NDArray[np.uint8]) -> None:
        """Starts copying `data`, shape (n,), into the part of `rank`, from byte `offset` on. Not collective.

        `data` must not change before `complete`. The other rank does not take part in the copy.
        """

    def complete(self) -> None:
        """Waits until all that this rank has started is complete, also in the memory of the other ranks.

        Not collective. What this rank starts afterwards takes effect later than what it has started before.
        """

    def store(self, rank: int, *, offset: int, value: int) -> None:
        """Starts replacing the int64 at byte `offset`, a multiple of 8, of the part of `rank`. Not collective."""

    def fetch_add(self, rank: int, *, offset: int, value: int) -> int:
        """Adds `value` to the int64 at byte `offset`, a multiple of 8, of the part of `rank`. Not collective.

        Returns the number from before the addition. Additions of several ranks take effect one after another.
        """

    def sync(self) -> None:
        """Orders accesses to `local`: those before the call take effect before those after it. Not collective.

        Also lets the library carry out what other ranks have started, if it needs this process for that.
        """

    def waits(self, what: str, *, place: int) -> None:
        """Tells the watchdog that this rank waits for another rank. The time until `progressed` has a limit.

        Args:
            what: What the rank waits for, in words.
            place: A number that does not decrease on any rank. A rank whose number is lower is named as late.
        """

    def progressed(self, *, place: int) -> None:
        """Tells the watchdog that this rank does not wait, or has seen progress. place: see `waits`."""

    def close(self) -> None:
        """Frees the memory. Collective."""


@final
class MpiRemoteMemory:
    """`RemoteMemory` in an MPI window, which all ranks can read until it is closed."""

    def __init__(self, mpi: Any, comm: Any, *, num_bytes: int) -> None:
        """Allocates the window. Collective.

        mpi: the module mpi4py.MPI.
        comm: communicator of all ranks, used by this object only.

        Raises CommunicationError on every rank if a node lacks the memory that its ranks request. Raises
        CommunicationError also if MPI cannot create the window.
        """
        self._mpi = mpi
        self._comm = comm
        self._rank = comm.Get_rank()
        self._byte = mpi.BYTE
        try:
            self._check_free_memory(num_bytes)
            self._window = mpi.Win.Allocate(num_bytes, 1, mpi.INFO_NULL, comm)
        except mpi.Exception as error:
            raise CommunicationError(
                f"MPI cannot make a window of {num_bytes / 1e6:.0f} MB for one-sided reads on rank {self._rank}: "
                f"{error}. Open MPI 4 with threads supports them within a node and over InfiniBand or UCX, not over "
                "TCP between nodes: do not use the memory store or the schedule ssp there"
            ) from error
        empty = np.empty(0, dtype=np.uint8)
        self._local = np.frombuffer(self._window, dtype=np.uint8) if num_bytes else empty
        # One access epoch until `close`: reads need no synchronization with the rank that they read from.
        self._window.Lock_all(mpi.MODE_NOCHECK)

    def _check_free_memory(self, num_bytes: int) -> None:
        """Raises CommunicationError on every rank if a node lacks memory for its ranks' parts.

        num_bytes: size of this rank's part.

        Without this check, MPI or the kernel would fail.
        """
        node = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self._rank)
        try:
            asked = np.zeros((node.Get_size(), 2), dtype=np.int64)
            node.Allgather(np.array([num_bytes, _free_bytes()], dtype=np.int64), asked)
        finally:
            node.Free()
        total, free = int(asked[:, 0].sum()), int(asked[:, 1].min())
        lacking = np.zeros((self._comm.Get_size(), 2), dtype=np.int64)
        self._comm.Allgather(np.array([total, free], dtype=np.int64), lacking)
        short = np.flatnonzero(lacking[:, 0] > lacking[:, 1])
        if len(short):
            total, free = lacking[short[0]].tolist()
            raise CommunicationError(
                f"the ranks of the node of rank {short[0]} need {total / 1e6:.0f} MB of memory that all ranks can "
                f"read, but only {free / 1e6:.0f} MB are free there: use more nodes, or turn off the memory "
                "store (containers: --shm-size makes /dev/shm larger)",
                agreed=True,
            )

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise CommunicationError(f"{operation} on rank {self._rank}: MPI reported {error}") from error

    @property
    def local(self) -> NDArray[np.uint8]:
        return self._local

    def publish(self) -> None:
        with self._reported("publishing memory"):
            self._window.Sync()
            self._comm.Barrier()
            self._window.Sync()

    def get(self, rank: int, *, offset: int, out: NDArray[np.uint8]) -> None:
        # Called for each sample: a context manager would take as long as the read itself.
        try:
            if len(out) <= _PIECE_BYTES:
                self._window.Get([out, self._byte], rank, (offset, len(out), self._byte))
                return
            for start in range(0, len(out), _PIECE_BYTES):
                piece = out[start : start + _PIECE_BYTES]
                self._window.Get([piece, self._byte], rank, (offset + start, len(piece), self._byte))
        except self._mpi.Exception as error:
            raise CommunicationError(
                f"reading from rank {rank} on rank {self._rank}: MPI reported {error}"
            ) from error

    def flush(self) -> None:
        with self._reported("reading from other ranks"):
            # A read is complete when it is complete at the origin.
            self._window.Flush_local_all()

    def put(self, rank: int, *, offset: int, data: NDArray[np.uint8]) -> None:
        with self._reported(f"writing to rank {rank}"):
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                self._window.Put([piece, self._byte], rank, (offset + start, len(piece), self._byte))

    def complete(self) -> None:
        with self._reported("completing one-sided operations"):
            self._window.Flush_all()

    def store(self, rank: int, *, offset: int, value: int) -> None:
        word = np.array([value], dtype=np.int64)
        with self._reported(f"writing to rank {rank}"):
            self._window.Accumulate(
                [word, self._mpi.INT64_T], rank, (offset, 1, self._mpi.INT64_T), self._mpi.REPLACE
            )
            self._window.Flush_local(rank)  # `word` must live until then

    def fetch_add(self, rank: int, *, offset: int, value: int) -> int:
        word, before = np.array([value], dtype=np.int64), np.zeros(1, dtype=np.int64)
        int64 = self._mpi.INT64_T
        with self._reported(f"adding to memory of rank {rank}"):
            self._window.Fetch_and_op([word, int64], [before, int64], rank, offset, self._mpi.SUM)
            self._window.Flush(rank)
        return int(before[0])

    def sync(self) -> None:
        self._window.Sync()
        self._comm.Iprobe()  # lets MPI make progress, where the network needs this process for it

    def waits(self, what: str, *, place: int) -> None:
        """Does nothing: this memory has no watchdog."""

    def progressed(self, *, place: int) -> None:
        """Does nothing: this memory has no watchdog."""

    def close(self) -> None:
        with self._reported("closing remote memory"):
            self._window.Unlock_all()
            self._local = np.empty(0, dtype=np.uint8)
            self._window.Free()
            self._comm.Free()


def _free_bytes() -> int:
    """Returns the number of bytes of memory that are free on this node for MPI windows."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 2**62
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return free


@final
class SharedRemoteMemory:
    """`RemoteMemory` for ranks in one process: threads, or a single rank."""

    def __init__(
        self, *, parts: Sequence[NDArray[np.uint8]], rank: int, barrier: Any, lock: Any = None
    ) -> None:
        """Creates one rank's access.

        parts: memory of every rank.
        barrier: function that waits for all ranks.
        lock: a lock that all ranks share; None for a single rank.
        """
        self._parts = parts
        self._rank = rank
        self._barrier = barrier
        self._lock = lock or threading.Lock()

    @property
    def local(self) -> NDArray[np.uint8]:
        return self._parts[self._rank]

    def publish(self) -> None:
        self._barrier()

    def get(self, rank: int, *, offset: int, out: NDArray[np.uint8]) -> None:
        out[:] = self._parts[rank][offset : offset + len(out)]

    def flush(self) -> None:
        """Does nothing: `get` has already copied the bytes."""

    def put(self, rank: int, *, offset: int, data: NDArray[np.uint8]) -> None:
        self._parts[rank][offset : offset + len(data)] = data

    def complete(self) -> None:
        """Does nothing: every operation is complete when it returns."""

    def store(self, rank: int, *, offset: int, value: int) -> None:
        with self._lock:
            self._word(rank, offset)[0] = value

    def fetch_add(self, rank: int, *, offset: int, value: int) -> int:
        with self._lock:
            word = self._word(rank, offset)
            before = int(word[0])
            word[0] = before + value
        return before

    def _word(self, rank: int, offset: int) -> NDArray[np.int64]:
        return self._parts[rank][offset : offset + 8].view(np.int64)

    def sync(self) -> None:
        """Does nothing: Python's lock orders the accesses of threads."""

    def waits(self, what: str, *, place: int) -> None:
        """Does nothing: this memory has no watchdog."""

    def progressed(self, *, place: int) -> None:
        """Does nothing: this memory has no watchdog."""

    def close(self) -> None:
        self._barrier()
        self._parts = ()
