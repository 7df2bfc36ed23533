"""Memory of each rank that every other rank may read without asking it: MPI's one-sided reads.

The MPI backend gives the module and the communicator; nothing here imports mpi4py.
Source: MPI 3.1 standard, sections 11.2.2 (MPI_Win_allocate) and 11.5.3 (passive target, MPI_Win_lock_all).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import CommunicationError

# Where Open MPI and MPICH keep windows on Linux: removed from there at once, so a killed run leaves nothing.
SHARED_MEMORY = Path("/dev/shm")
# MPI counts are 32-bit: a longer read goes in pieces.
_PIECE_BYTES = 1 << 30


@runtime_checkable
class RemoteMemory(Protocol):
    """This rank's end of memory that lies with all ranks. `get` and `flush` may be called by several threads.

    Write to `local`, then all ranks `publish`; from then on nobody writes.
    """

    @property
    def local(self) -> NDArray[np.uint8]:
        """This rank's own part, shape (num_bytes,). Not to be used after `close`."""

    def publish(self) -> None:
        """What the ranks have written to `local` can be read by all. Collective."""

    def get(self, rank: int, *, offset: int, out: NDArray[np.uint8]) -> None:
        """Begin to copy bytes offset, ..., offset + len(out) - 1 of `rank` into `out`, contiguous, shape (n,).

        `out` is filled after `flush`. The other rank has nothing to do for it. Not collective.
        """

    def flush(self) -> None:
        """Wait until everything that this rank began to get is there. Not collective."""

    def close(self) -> None:
        """Give the memory back. Collective."""


@final
class MpiRemoteMemory:
    """`RemoteMemory` in an MPI window, open for reading by all for as long as it lives."""

    def __init__(self, mpi: Any, comm: Any, *, num_bytes: int) -> None:
        """mpi: the module mpi4py.MPI. comm: all ranks' communicator, for this object alone. Collective.

        CommunicationError, on every rank, where a node has not enough memory for what its ranks ask for, and
        where MPI can make no window.
        """
        self._mpi = mpi
        self._comm = comm
        self._rank = comm.Get_rank()
        self._byte = mpi.BYTE
        try:
            self._check_room(num_bytes)
            self._window = mpi.Win.Allocate(num_bytes, 1, mpi.INFO_NULL, comm)
        except mpi.Exception as error:
            raise CommunicationError(
                f"MPI makes no window of {num_bytes / 1e6:.0f} MB for one-sided reads on rank {self._rank}: "
                f"{error}. Open MPI 4 with threads has them within a node and over InfiniBand or UCX, not over "
                "TCP between nodes: do without the memory store there"
            ) from error
        empty = np.empty(0, dtype=np.uint8)
        self._local = np.frombuffer(self._window, dtype=np.uint8) if num_bytes else empty
        # One epoch for ever: reads need no further agreement with the rank that they read from.
        self._window.Lock_all(mpi.MODE_NOCHECK)

    def _check_room(self, num_bytes: int) -> None:
        """Refuse on every rank before MPI would, or the kernel at the first touch of a page."""
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
                f"the ranks of the node of rank {short[0]} ask for {total / 1e6:.0f} MB of memory that all "
                f"ranks can read, {free / 1e6:.0f} MB are free there: use more nodes, or do without the memory "
                "store (containers: --shm-size makes /dev/shm larger)",
                agreed=True,
            )

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise CommunicationError(f"{operation} on rank {self._rank}: MPI says {error}") from error

    @property
    def local(self) -> NDArray[np.uint8]:
        return self._local

    def publish(self) -> None:
        with self._reported("publishing memory"):
            self._window.Sync()
            self._comm.Barrier()
            self._window.Sync()

    def get(self, rank: int, *, offset: int, out: NDArray[np.uint8]) -> None:
        # Called for each sample: no context manager here, which would take as long as the read.
        try:
            if len(out) <= _PIECE_BYTES:
                self._window.Get([out, self._byte], rank, (offset, len(out), self._byte))
                return
            for start in range(0, len(out), _PIECE_BYTES):
                piece = out[start : start + _PIECE_BYTES]
                self._window.Get([piece, self._byte], rank, (offset + start, len(piece), self._byte))
        except self._mpi.Exception as error:
            raise CommunicationError(
                f"reading from rank {rank} on rank {self._rank}: MPI says {error}"
            ) from error

    def flush(self) -> None:
        with self._reported("reading from other ranks"):
            # Of a read, the origin's side is all there is: local completion is completion.
            self._window.Flush_local_all()

    def close(self) -> None:
        with self._reported("closing remote memory"):
            self._window.Unlock_all()
            self._local = np.empty(0, dtype=np.uint8)
            self._window.Free()
            self._comm.Free()


def _free_bytes() -> int:
    """What this node can still give to windows."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 2**62
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return free


@final
class SharedRemoteMemory:
    """`RemoteMemory` of ranks that live in one process: of threads, or of a single rank."""

    def __init__(self, *, parts: Sequence[NDArray[np.uint8]], rank: int, barrier: Any) -> None:
        """parts: every rank's memory. barrier: waits for all ranks."""
        self._parts = parts
        self._rank = rank
        self._barrier = barrier

    @property
    def local(self) -> NDArray[np.uint8]:
        return self._parts[self._rank]

    def publish(self) -> None:
        self._barrier()

    def get(self, rank: int, *, offset: int, out: NDArray[np.uint8]) -> None:
        out[:] = self._parts[rank][offset : offset + len(out)]

    def flush(self) -> None:
        """Everything is there already."""

    def close(self) -> None:
        self._barrier()
        self._parts = ()
