"""MPI through mpi4py: the world of all ranks. The only file of hpctrain that imports mpi4py."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from hpctrain.comm.backends.mpi4py_failure import explain_failure
from hpctrain.comm.backends.mpi_group import MpiGroup, make_collective_files
from hpctrain.comm.backends.mpi_messages.peers import MpiMessages
from hpctrain.comm.backends.mpi_messages.pieces import MOST_BYTES
from hpctrain.comm.backends.mpi_process.exit_status import (
    finalize_at_exit,
    leave_finalizing,
    take_over_finalizing,
)
from hpctrain.comm.backends.mpi_transport import MpiTransport
from hpctrain.comm.interface.buffer_checks import MAX_CHUNK_ELEMS, check_groups
from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.communicator import Collective
from hpctrain.comm.interface.peer_messages import PeerMessages
from hpctrain.comm.interface.remote_memory import MpiRemoteMemory, RemoteMemory
from hpctrain.comm.interface.transport import NUM_TAGS, Transport
from hpctrain.comm.interface.world_forwarding import Forwarding
from hpctrain.errors import LaunchError
from hpctrain.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

_ABORT_MAY_TAKE_S = 3.0


def _import_mpi(*, initialize: bool = True) -> Any:
    """Returns mpi4py's MPI module. Importing it initialises MPI, so it is imported only when a world is opened.

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
    """Ends all ranks of COMM_WORLD with `exit_code` if MPI is initialised, by any library; else does nothing.

    On a node without network MPI_Abort blocks; this process then ends after `_ABORT_MAY_TAKE_S`. Not collective.
    """
    mpi = _import_mpi(initialize=False)
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return
    last_resort = threading.Timer(_ABORT_MAY_TAKE_S, os._exit, args=(exit_code,))
    last_resort.daemon = True
    last_resort.start()
    # Not mpi4py's Abort: it holds Python's lock while it waits, so the timer could not run.
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

    Horovod may have initialised MPI. Raises LaunchError if mpi4py is missing or MPI is not running.
    """
    mpi = _import_mpi(initialize=False)
    if not mpi.Is_initialized():
        raise LaunchError("MPI is not running: point-to-point messages need a backend that runs over MPI")
    return MpiTransport(mpi, mpi.COMM_WORLD.Dup(), topology=topology)


def open_remote_memory(num_bytes: int) -> RemoteMemory:
    """Implements `World.remote_memory`; Horovod may have initialised MPI. Collective over all ranks."""
    mpi = _import_mpi(initialize=False)
    return MpiRemoteMemory(mpi, mpi.COMM_WORLD.Dup(), num_bytes=num_bytes)


def open_collective_files(members: Sequence[int]) -> CollectiveFiles:
    """Returns collective files of the world ranks `members`; Horovod may have initialised MPI.

    Collective over `members`. Raises CommunicationError if these are not ranks of MPI's COMM_WORLD.
    """
    return make_collective_files(_import_mpi(initialize=False), members)


@final
class MpiWorld(Forwarding):
    """All ranks that the MPI launcher started."""

    def __init__(self, comm: MPI.Intracomm, *, chunk_elems: int = MAX_CHUNK_ELEMS) -> None:
        """Use `open`. comm: a communicator used by this object only."""
        self._comm = comm
        self._chunk_elems = chunk_elems
        self._group = MpiGroup(comm, members=tuple(range(comm.Get_size())), chunk_elems=chunk_elems)
        self._closed = False

    @classmethod
    def open(cls, *, chunk_elems: int = MAX_CHUNK_ELEMS) -> MpiWorld:
        """Initialises MPI unless it is, and duplicates COMM_WORLD. Collective.

        chunk_elems: maximum number of elements in one MPI call. Raises LaunchError if mpi4py is missing or MPI lacks
        MPI_THREAD_MULTIPLE.
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
        # Groups with common members may be made at the same time, each by its own members.
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
        """Frees the communicator. MPI itself ends with the process: other libraries (HDF5) may still use it."""
        if not self._closed:
            self._closed = True
            self._comm.Free()
