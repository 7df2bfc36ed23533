"""MPI through mpi4py: the world of all ranks, and its transport. The only module of hpctrain that imports mpi4py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from hpctrain.comm.backends.library_probe import explain_failure
from hpctrain.comm.backends.mpi_group import MpiGroup, make_collective_files
from hpctrain.comm.backends.mpi_messages import MOST_BYTES, MpiMessages, piece_bytes, pieces
from hpctrain.comm.backends.mpi_process.exit_status import (
    finalize_at_exit,
    leave_finalizing,
    take_over_finalizing,
)
from hpctrain.comm.interface.buffer_checks import MAX_CHUNK_ELEMS, check_groups
from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.communicator import Collective, Forwarding
from hpctrain.comm.interface.remote_memory import MpiRemoteMemory, RemoteMemory
from hpctrain.comm.interface.transport import NUM_TAGS, PeerMessages, Pending, Transport
from hpctrain.errors import CommunicationError, LaunchError
from hpctrain.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

# Where Open MPI and MPICH keep shared windows on Linux.
SHARED_MEMORY = Path("/dev/shm")


@final
class MpiTransport:
    """`Transport` over a separate MPI communicator: MPI messages, and MPI's shared windows within a node.

    Source of the shared window: MPI 3.1 standard, section 11.2.3 (MPI_Win_allocate_shared).
    """

    def __init__(self, mpi: Any, comm: Any, *, topology: Topology) -> None:
        """Splits off the communicator of this rank's node. Collective.

        mpi: the module mpi4py.MPI.
        comm: communicator of all ranks, used by this object only.
        """
        self._mpi = mpi
        self._comm = comm
        self._topology = topology
        self._rank = comm.Get_rank()
        # By the topology and not by MPI's nodes, because nodes may be emulated.
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
        """Raises CommunicationError on all ranks of the node if the node lacks memory for the ranks' segments.

        num_bytes: size of this rank's segment.

        Without this check, MPI or the kernel would fail.
        """
        free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 2**62
        asked = np.zeros((self._node.Get_size(), 2), dtype=np.int64)
        self._node.Allgather(np.array([num_bytes, free], dtype=np.int64), asked)
        total, least_free = int(asked[:, 0].sum()), int(asked[:, 1].min())
        if total > least_free:
            raise CommunicationError(
                f"the ranks of node {self._topology.node_names[self._topology.node_of(self._rank)]} need "
                f"{total / 1e6:.0f} MB of shared memory, but {SHARED_MEMORY} has only {least_free / 1e6:.0f} MB "
                "free: make it larger (containers: --shm-size), or choose the algorithm direct or flat",
                agreed=False,
            )

    def fence(self) -> None:
        if self._windows:
            self._windows[-1].Sync()

    def begun(self, what: str) -> None:
        """Does nothing: this transport has no watchdog."""

    def waits(self, what: str) -> None:
        """Does nothing: this transport has no watchdog."""

    def progressed(self) -> None:
        """Does nothing: this transport has no watchdog."""

    def close(self) -> None:
        for window in self._windows:
            window.Unlock_all()
            window.Free()
        self._windows.clear()
        self._node.Free()
        self._comm.Free()


def _tensor_of(memory: Any) -> torch.Tensor:
    """Returns the memory of a window segment as a uint8 tensor, without a copy."""
    if len(memory) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


# MPI through mpi4py.


_ABORT_MAY_TAKE_S = 3.0


def _import_mpi(*, initialize: bool = True) -> Any:
    """Returns mpi4py's MPI module. The import initializes MPI, so it happens only when a world is opened.

    initialize: False to import the module without initializing MPI.

    Raises LaunchError if mpi4py cannot be loaded.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = initialize
        # The bucket thread and the main thread may communicate at the same time.
        mpi4py.rc.thread_level = "multiple"
        finalizes = leave_finalizing(mpi4py.rc)
        from mpi4py import MPI

        if finalizes:
            finalize_at_exit(MPI)
        elif initialize:
            take_over_finalizing(MPI)
    except (ImportError, RuntimeError) as error:
        found, remedy = explain_failure(error)
        raise LaunchError(f"{found}; {remedy}, or choose another backend") from error
    return MPI


def abort_all(exit_code: int) -> None:
    """Ends all ranks of COMM_WORLD with `exit_code`, if any library has initialized MPI. Not collective.

    MPI_Abort blocks on a node whose network is cut: in that case only this process ends, after `_ABORT_MAY_TAKE_S`.
    """
    mpi = _import_mpi(initialize=False)
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return
    last_resort = threading.Timer(_ABORT_MAY_TAKE_S, os._exit, args=(exit_code,))
    last_resort.daemon = True
    last_resort.start()
    # mpi4py's Abort holds Python's lock while it waits, so that the timer could not run: call MPI directly.
    library = ctypes.CDLL(mpi.__file__)
    handle = (ctypes.c_void_p if mpi._sizeof(mpi.Comm) == 8 else ctypes.c_int).from_address(
        mpi._addressof(mpi.COMM_WORLD)
    )
    library.MPI_Abort(handle, ctypes.c_int(exit_code))


def can_open_transport() -> bool:
    """Returns True if mpi4py is installed and MPI runs with MPI_THREAD_MULTIPLE. Not collective."""
    try:
        mpi = _import_mpi(initialize=False)
    except LaunchError:
        return False
    return bool(mpi.Is_initialized()) and mpi.Query_thread() >= mpi.THREAD_MULTIPLE


def open_transport(topology: Topology) -> Transport:
    """Returns a transport over all ranks, in a separate message space. Collective.

    Also works if Horovod, and not hpctrain, has initialized MPI. Raises LaunchError if mpi4py is missing or MPI is not
    running.
    """
    mpi = _import_mpi(initialize=False)
    if not mpi.Is_initialized():
        raise LaunchError("MPI is not running: point-to-point messages need a backend that runs over MPI")
    return MpiTransport(mpi, mpi.COMM_WORLD.Dup(), topology=topology)


def open_remote_memory(num_bytes: int) -> RemoteMemory:
    """Implements `World.remote_memory`. Collective over all ranks. Also works if Horovod has initialized MPI."""
    mpi = _import_mpi(initialize=False)
    return MpiRemoteMemory(mpi, mpi.COMM_WORLD.Dup(), num_bytes=num_bytes)


def open_collective_files(members: Sequence[int]) -> CollectiveFiles:
    """Returns collective files for the world ranks `members`. Collective over `members`.

    Also works if Horovod has initialized MPI. Raises CommunicationError if `members` are not ranks of COMM_WORLD.
    """
    return make_collective_files(_import_mpi(initialize=False), members)


@final
class MpiWorld(Forwarding):
    """The world of all ranks that the MPI launcher started."""

    def __init__(self, comm: MPI.Intracomm, *, chunk_elems: int = MAX_CHUNK_ELEMS) -> None:
        """Wraps `comm`, a communicator used by this object only. Use `open` instead."""
        self._comm = comm
        self._chunk_elems = chunk_elems
        self._group = MpiGroup(comm, members=tuple(range(comm.Get_size())), chunk_elems=chunk_elems)
        self._closed = False

    @classmethod
    def open(cls, *, chunk_elems: int = MAX_CHUNK_ELEMS) -> MpiWorld:
        """Initializes MPI, unless that was done before, and duplicates COMM_WORLD. Collective.

        chunk_elems: largest number of elements in one MPI call.

        Raises LaunchError if mpi4py is missing or MPI lacks MPI_THREAD_MULTIPLE.
        """
        mpi = _import_mpi()
        provided = mpi.Query_thread()
        if provided < mpi.THREAD_MULTIPLE:
            raise LaunchError(
                f"MPI provides thread level {provided}, hpctrain needs MPI_THREAD_MULTIPLE "
                f"({mpi.THREAD_MULTIPLE}): build MPI with it, or import hpctrain before other libraries initialise MPI"
            )
        return cls(mpi.COMM_WORLD.Dup(), chunk_elems=chunk_elems)

    @property
    def reduction_backend(self) -> str:
        return self.backend

    def open_reduction_world(self) -> MpiWorld:
        return MpiWorld(self._comm.Dup(), chunk_elems=self._chunk_elems)

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        check_groups(groups, num_ranks=self.num_ranks)
        mpi = _import_mpi()
        color, place = mpi.UNDEFINED, 0
        members: tuple[int, ...] = ()
        for index, group in enumerate(groups):
            if self.rank in group:
                color, place, members = index, list(group).index(self.rank), tuple(group)
        comm = self._comm.Split(color, key=place)
        if comm == mpi.COMM_NULL:
            return None
        return MpiGroup(comm, members=members, chunk_elems=self._chunk_elems)

    def duplicate(self) -> Collective:
        return MpiGroup(self._comm.Dup(), members=self.members, chunk_elems=self._chunk_elems)

    def open_group(self, members: Sequence[int]) -> tuple[Collective, PeerMessages | None]:
        mpi = _import_mpi()
        everyone = self._comm.Get_group()
        group = everyone.Incl(list(members))
        # Groups with common members may be created at the same time, each by its own members.
        comm = self._comm.Create_group(group, tag=zlib.crc32(str(list(members)).encode()) % NUM_TAGS)
        group.Free()
        everyone.Free()
        collective = MpiGroup(comm, members=tuple(members), chunk_elems=self._chunk_elems, polls=True)
        return collective, MpiMessages(mpi, comm.Dup(), most_bytes=min(MOST_BYTES, self._chunk_elems))

    def transport(self, topology: Topology) -> Transport:
        return open_transport(topology)

    def remote_memory(self, num_bytes: int) -> RemoteMemory:
        return open_remote_memory(num_bytes)

    def abort(self, exit_code: int) -> None:
        """Ends all ranks through MPI_Abort, from any thread; the launcher returns `exit_code`."""
        sys.stdout.flush()
        sys.stderr.flush()
        abort_all(exit_code)

    def close(self) -> None:
        """Frees the communicator. MPI itself ends with the process, since other libraries (HDF5) may still use it."""
        if not self._closed:
            self._closed = True
            self._comm.Free()
