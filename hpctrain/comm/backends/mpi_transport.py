"""`Transport` over MPI: messages, and MPI's shared windows within a node.

`hpctrain.comm.backends.mpi_world`, the only module that imports mpi4py, passes the communicators.
Source of the shared window: MPI 3.1 standard, section 11.2.3 (MPI_Win_allocate_shared).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm.backends.mpi_messages.pieces import MOST_BYTES, piece_bytes, pieces
from hpctrain.comm.interface.transport import Pending
from hpctrain.errors import CommunicationError
from hpctrain.topology import Topology

# Where Open MPI and MPICH keep shared windows on Linux.
SHARED_MEMORY = Path("/dev/shm")


@final
class MpiTransport:
    """`Transport` over a separate MPI communicator."""

    def __init__(self, mpi: Any, comm: Any, *, topology: Topology) -> None:
        """mpi: the module mpi4py.MPI. comm: communicator of all ranks, used by this object only. Collective."""
        self._mpi = mpi
        self._comm = comm
        self._topology = topology
        self._rank = comm.Get_rank()
        # By the topology, not by MPI's notion of a node: nodes may be emulated.
        self._node = comm.Split(topology.node_of(self._rank), key=self._rank)
        self._windows: list[Any] = []
        self._byte = mpi.BYTE
        # Equal on every rank: messages between two ranks with one tag arrive in the order in which they were sent.
        self._piece_bytes = piece_bytes(mpi, comm) or MOST_BYTES

    @property
    def rank(self) -> int:
        return int(self._rank)

    @property
    def topology(self) -> Topology:
        return self._topology

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise CommunicationError(f"{operation} on rank {self._rank}: MPI reported {error}") from error

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        with self._reported(f"send to rank {to}"):
            array = buffer.numpy()
            return [self._comm.Isend([array[piece], self._byte], to, tag) for piece in self._pieces(array)]

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Pending:
        with self._reported(f"receive from rank {source}"):
            array = buffer.numpy()
            return [
                self._comm.Irecv([array[piece], self._byte], source, tag) for piece in self._pieces(array)
            ]

    def _pieces(self, array: Any) -> Iterator[slice]:
        return pieces(len(array), most=self._piece_bytes)

    def all_done(self, pending: Sequence[Pending]) -> bool:
        with self._reported("messages"):
            return bool(self._mpi.Request.Testall([request for message in pending for request in message]))

    def share(self, num_bytes: int) -> list[torch.Tensor]:
        with self._reported("shared memory"):
            self._check_free_memory(num_bytes)
            window = self._mpi.Win.Allocate_shared(num_bytes, 1, self._mpi.INFO_NULL, self._node)
            self._windows.append(window)
            window.Lock_all(self._mpi.MODE_NOCHECK)  # `fence` calls Win.Sync, which requires such an epoch
            segments = []
            for local_rank in range(self._node.Get_size()):
                memory, _ = window.Shared_query(local_rank)
                segments.append(_tensor_of(memory))
            segments[self._node.Get_rank()].zero_()
            window.Sync()
            self._node.Barrier()
        return segments

    def _check_free_memory(self, num_bytes: int) -> None:
        """Raises CommunicationError on every rank of the node if memory is short, before MPI or the kernel fails."""
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 2**62
        asked = np.zeros((self._node.Get_size(), 2), dtype=np.int64)
        self._node.Allgather(np.array([num_bytes, free], dtype=np.int64), asked)
        total, least_free = int(asked[:, 0].sum()), int(asked[:, 1].min())
        if total > least_free:
            raise CommunicationError(
                f"the ranks of node {self._topology.node_names[self._topology.node_of(self._rank)]} need "
                f"{total / 1e6:.0f} MB of shared memory, {SHARED_MEMORY} has {least_free / 1e6:.0f} MB free: make it "
                "larger (containers: --shm-size), or choose the algorithm direct or flat",
                agreed=False,
            )

    def fence(self) -> None:
        if self._windows:
            self._windows[-1].Sync()

    def begun(self, what: str) -> None:
        """Does nothing: there is no watchdog here."""

    def waits(self, what: str) -> None:
        """Does nothing: there is no watchdog here."""

    def progressed(self) -> None:
        """Does nothing: there is no watchdog here."""

    def close(self) -> None:
        for window in self._windows:
            window.Unlock_all()
            window.Free()
        self._windows.clear()
        self._node.Free()
        self._comm.Free()


def _tensor_of(memory: Any) -> torch.Tensor:
    """Returns a window's segment as a uint8 tensor, without a copy."""
    if len(memory) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)
