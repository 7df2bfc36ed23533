"""MPI through mpi4py. The only file of hpctrain that imports mpi4py.

MPI receives numpy views of CPU tensors, without a copy. Tensors on another device are copied to the host, which works
with every MPI, including those without device support.

Half types have no MPI type. They are sent as 16-bit integers: an all-to-all of slices, a float32 sum in rank
order at each slice's owner, one rounding, and an all-gather. That sends as many bytes as a ring all-reduce.

Source of the reduction by slices: Thakur et al. 2005, Optimization of Collective Communication Operations
in MPICH, section 4.5 (reduce-scatter followed by all-gather).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from hpctrain.comm.backends.mpi_transport import MpiTransport
from hpctrain.comm.interface.attributes import Attributes
from hpctrain.comm.interface.buffer_checks import (
    HALF_TYPES,
    MAX_CHUNK_ELEMS,
    check_buffer,
    check_counts,
    check_exchange,
    check_groups,
    check_part,
    check_root,
    gather_bytes,
    offsets_of,
    pack,
    sum_in_order,
    windows_of,
)
from hpctrain.comm.interface.collective_files import CollectiveFiles, MpiCollectiveFiles
from hpctrain.comm.interface.communicator import Collective, ReduceOp
from hpctrain.comm.interface.host_copies import on_host, to_host
from hpctrain.comm.interface.remote_memory import MpiRemoteMemory, RemoteMemory
from hpctrain.comm.interface.transport import Transport
from hpctrain.comm.interface.world_forwarding import Forwarding
from hpctrain.errors import CommunicationError, LaunchError
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

_ABORT_MAY_TAKE_S = 3.0
# all_to_all sends the only point-to-point messages of a group's communicator, so one tag suffices.
ALL_TO_ALL_TAG = 1


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
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py cannot be loaded ({error}): install it (make setup), or choose another backend"
        ) from error
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
    mpi = _import_mpi(initialize=False)
    try:
        group = mpi.COMM_WORLD.Get_group().Incl(list(members))
        comm = mpi.COMM_WORLD.Create_group(group)
        group.Free()
    except mpi.Exception as error:
        raise CommunicationError(f"opening files on ranks {list(members)}: MPI reported {error}") from error
    return MpiCollectiveFiles(mpi, comm)


def _view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a numpy view of a CPU tensor: 16-bit integers for the half types."""
    tensor = tensor.detach()
    if tensor.dtype in HALF_TYPES:
        tensor = tensor.view(torch.int16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


@final
class MpiGroup(Attributes):
    """Collective operations over one MPI communicator."""

    def __init__(
        self, comm: MPI.Comm, *, members: tuple[int, ...], chunk_elems: int = MAX_CHUNK_ELEMS
    ) -> None:
        self._comm = comm
        self._members = members
        self._rank = comm.Get_rank()
        self._chunk_elems = max(chunk_elems, len(members))
        self._mpi = sys.modules["mpi4py.MPI"]

    @property
    def backend(self) -> str:
        return "mpi"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return len(self._members)

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise CommunicationError(
                f"{operation} on rank {self._members[self._rank]} of {self.num_ranks}: MPI reported {error}"
            ) from error

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        """See `Collective.all_reduce`. For MAX, the result with NaN depends on the MPI library."""
        check_buffer(buffer, operation="all_reduce", rank=self.rank)
        with self._reported("all_reduce"), on_host(buffer) as host:
            for chunk in host.split(self._chunk_elems):
                if chunk.numel() == 0:
                    continue  # torch splits an empty tensor into one empty chunk
                if chunk.dtype not in HALF_TYPES:
                    mpi_op = self._mpi.SUM if op is ReduceOp.SUM else self._mpi.MAX
                    self._comm.Allreduce(self._mpi.IN_PLACE, _view(chunk), op=mpi_op)
                elif op is ReduceOp.MAX:
                    wide = chunk.float()  # exact: every half value is a float32 value
                    self._comm.Allreduce(self._mpi.IN_PLACE, _view(wide), op=self._mpi.MAX)
                    chunk.copy_(wide)
                else:
                    counts = split_evenly(chunk.numel(), num_parts=self.num_ranks)
                    self._gather_into(chunk, part=self._sum_slices(chunk, counts=counts), counts=counts)

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        self.all_reduce(buffer)
        return lambda: None

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        check_buffer(buffer, operation="reduce_scatter", rank=self.rank)
        check_counts(
            buffer.numel(),
            counts=counts,
            operation="reduce_scatter",
            rank=self.rank,
            num_ranks=self.num_ranks,
        )
        host = to_host(buffer)
        mine = torch.empty(counts[self.rank], dtype=buffer.dtype)
        with self._reported("reduce_scatter"):
            for begins, widths in windows_of(counts, max_elems=self._chunk_elems):
                packed = pack(host, counts=counts, begins=begins, widths=widths)
                begin, width = begins[self.rank], widths[self.rank]
                if buffer.dtype in HALF_TYPES:
                    mine[begin : begin + width] = self._sum_slices(packed, counts=widths)
                else:
                    self._comm.Reduce_scatter(
                        _view(packed), _view(mine[begin : begin + width]), recvcounts=widths, op=self._mpi.SUM
                    )
        return mine.to(buffer.device)

    def all_gather(self, part: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        check_part(part, counts=counts, rank=self.rank, num_ranks=self.num_ranks)
        host = to_host(part)
        whole = torch.empty(sum(counts), dtype=part.dtype)
        offsets = offsets_of(counts)
        with self._reported("all_gather"):
            for begins, widths in windows_of(counts, max_elems=self._chunk_elems):
                piece = host[begins[self.rank] : begins[self.rank] + widths[self.rank]]
                if widths == list(counts):
                    self._gather_into(whole, part=piece, counts=widths)
                    continue
                packed = torch.empty(sum(widths), dtype=part.dtype)
                self._gather_into(packed, part=piece, counts=widths)
                for place, received in enumerate(packed.split(widths)):
                    begin = offsets[place] + begins[place]
                    whole[begin : begin + widths[place]] = received
        return whole.to(part.device)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """See `Collective.all_to_all`. Sends point-to-point messages.

        Long buffers must be split. For Alltoallv the ranks would first have to agree on the chunks, as their counts
        differ; the two ranks of a pair both know the count of their slice, and so its chunks.
        """
        check_exchange(
            buffer, send_counts=send_counts, receive_counts=receive_counts, rank=self.rank,
            num_ranks=self.num_ranks,
        )  # fmt: skip
        host = to_host(buffer)
        received = torch.empty(sum(receive_counts), dtype=buffer.dtype)
        incoming, outgoing = received.split(list(receive_counts)), host.split(list(send_counts))
        requests: list[Any] = []
        with self._reported("all_to_all"):
            # In order of distance, so that not all ranks send to rank 0 at once.
            for distance in range(1, self.num_ranks):
                source = (self.rank - distance) % self.num_ranks
                requests += [
                    self._comm.Irecv(_view(piece), source=source, tag=ALL_TO_ALL_TAG)
                    for piece in incoming[source].split(self._chunk_elems)
                    if piece.numel()
                ]
            for distance in range(1, self.num_ranks):
                to = (self.rank + distance) % self.num_ranks
                requests += [
                    self._comm.Isend(_view(piece), dest=to, tag=ALL_TO_ALL_TAG)
                    for piece in outgoing[to].split(self._chunk_elems)
                    if piece.numel()
                ]
            incoming[self.rank].copy_(outgoing[self.rank])
            self._mpi.Request.Waitall(requests)
        return received.to(buffer.device)

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        check_buffer(buffer, operation="broadcast", rank=self.rank)
        check_root(root, rank=self.rank, num_ranks=self.num_ranks)
        with self._reported("broadcast"), on_host(buffer) as host:
            for chunk in host.split(self._chunk_elems):
                if chunk.numel():
                    self._comm.Bcast(_view(chunk), root=root)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return gather_bytes(self, data)

    def barrier(self) -> None:
        with self._reported("barrier"):
            self._comm.Barrier()

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles:
        return open_collective_files(self._members if members is None else members)

    def _sum_slices(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        """Returns the sum over the ranks of this rank's slice of half-precision `buffer`, shape (counts[rank],)."""
        width = counts[self.rank]
        received = torch.empty(self.num_ranks * width, dtype=buffer.dtype)
        self._comm.Alltoallv(
            [_view(buffer), (list(counts), offsets_of(counts)[:-1])],
            [_view(received), ([width] * self.num_ranks, [r * width for r in range(self.num_ranks)])],
        )
        return sum_in_order(list(received.view(self.num_ranks, width).unbind()))

    def _gather_into(self, whole: torch.Tensor, *, part: torch.Tensor, counts: Sequence[int]) -> None:
        self._comm.Allgatherv(_view(part), [_view(whole), (list(counts), offsets_of(counts)[:-1])])


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
