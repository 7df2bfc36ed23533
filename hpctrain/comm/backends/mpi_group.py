"""Collective operations over one MPI communicator, which `hpctrain.comm.backends.mpi_world` passes.

MPI receives numpy views of CPU tensors, without a copy. Tensors on another device are copied to the host, which works
with every MPI, including those without device support.

float16 and bfloat16 have no MPI type and are sent as 16-bit integers. They are summed by slices: an all-to-all of the
slices, a float32 sum in rank order at the owner of each slice, one rounding, and an all-gather. That sends as many
bytes as a ring all-reduce. Groups that wait by polling (see `MpiGroup`) also sum large buffers of the other types by
slices, and send large slices in a ring (`mpi_messages.py`).

Source of the reduction by slices: Thakur et al. 2005, Optimization of Collective Communication Operations in MPICH,
section 4.5 (reduce-scatter followed by all-gather).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm.backends.mpi_messages import MessageRing, piece_bytes, pieces
from hpctrain.comm.interface.buffer_checks import (
    HALF_TYPES,
    MAX_CHUNK_ELEMS,
    check_buffer,
    check_exchange,
    check_out,
    check_part,
    check_root,
    check_slices,
    filled,
    gather_bytes,
    offsets_of,
    on_host,
    pack,
    sum_in_order,
    to_host,
    windows_of,
)
from hpctrain.comm.interface.collective_files import CollectiveFiles, MpiCollectiveFiles
from hpctrain.comm.interface.communicator import Attributes, ReduceOp
from hpctrain.comm.interface.transport import poll_until
from hpctrain.errors import CommunicationError
from hpctrain.storage import split_evenly

# Rings use another tag. Within one operation, messages between two ranks arrive in order, so one tag suffices.
ALL_TO_ALL_TAG = 1
# Buffers of at least this size are summed by slices in a group that polls: for smaller ones, messages cost more than
# bytes.
_SLICED_BYTES = 1 << 16
# Parts of at least this size are sent in a ring: for smaller ones, the steps of a ring cost more than the bytes.
_RING_BYTES = 1 << 16
# Largest number of bytes in flight from one rank to another: MPI copies waiting messages, and keeps that memory.
_EXCHANGED_BYTES = 1 << 22


def _view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a numpy view of a CPU tensor; float16 and bfloat16 are viewed as 16-bit integers."""
    tensor = tensor.detach()
    if tensor.dtype in HALF_TYPES:
        tensor = tensor.view(torch.int16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


def _is_exact(buffer: torch.Tensor) -> bool:
    """Returns False for float16 and bfloat16, because each addition in a ring would round the sum."""
    return buffer.dtype not in HALF_TYPES


def make_collective_files(mpi: Any, members: Sequence[int]) -> CollectiveFiles:
    """Returns collective files for some world ranks. Collective over `members`.

    mpi: the module mpi4py.MPI.
    members: world ranks that use the files.

    Raises CommunicationError if `members` are not ranks of MPI's COMM_WORLD.
    """
    try:
        group = mpi.COMM_WORLD.Get_group().Incl(list(members))
        comm = mpi.COMM_WORLD.Create_group(group)
        group.Free()
    except mpi.Exception as error:
        raise CommunicationError(f"opening files on ranks {list(members)}: MPI reported {error}") from error
    return MpiCollectiveFiles(mpi, comm)


@final
class MpiGroup(Attributes):
    """Collective operations over one MPI communicator. The constructor is collective over this communicator.

    comm: mpi4py communicator, used by this object only.
    polls: if True, this object waits by polling the operation with pauses, so that another thread can use the core.
    MPI's own waits keep the core busy.
    """

    def __init__(
        self,
        comm: Any,
        *,
        members: tuple[int, ...],
        chunk_elems: int = MAX_CHUNK_ELEMS,
        polls: bool = False,
    ) -> None:
        self._comm = comm
        self._polls = polls
        self._members = members
        self._rank = comm.Get_rank()
        self._chunk_elems = max(chunk_elems, len(members))
        self._mpi = sys.modules["mpi4py.MPI"]
        self._piece_bytes = piece_bytes(self._mpi, comm) if len(members) > 1 else None
        self._ring = MessageRing(comm, piece_bytes=self._piece_bytes) if polls and len(members) > 1 else None

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

    def _call(self, operation: str, *arguments: Any, **options: Any) -> None:
        """Runs a collective MPI operation to its end.

        operation: mpi4py's name of the blocking operation.
        """
        if self._polls:
            poll_until(getattr(self._comm, f"I{operation.lower()}")(*arguments, **options).Test)
        else:
            getattr(self._comm, operation)(*arguments, **options)

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduces `buffer` over the ranks, in place; see `Collective.all_reduce`.

        For MAX, the result for buffers that contain NaN depends on the MPI library.
        """
        check_buffer(buffer, operation="all_reduce", rank=self.rank)
        with self._reported("all_reduce"), on_host(buffer) as host:
            for chunk in host.split(self._chunk_elems):
                if chunk.numel() == 0:
                    continue  # torch splits an empty tensor into one empty chunk
                if self._ring is not None and self.num_ranks == 2 and op is ReduceOp.SUM and _is_exact(chunk):
                    self._ring.sum_of_two(_view(chunk))
                elif op is ReduceOp.SUM and self._sums_slices(chunk):
                    counts = split_evenly(chunk.numel(), num_parts=self.num_ranks)
                    self._gather_into(chunk, part=self._sum_slices(chunk, counts=counts), counts=counts)
                elif chunk.dtype not in HALF_TYPES:
                    mpi_op = self._mpi.SUM if op is ReduceOp.SUM else self._mpi.MAX
                    self._call("Allreduce", self._mpi.IN_PLACE, _view(chunk), op=mpi_op)
                else:
                    wide = chunk.float()  # exact: every half value is a float32 value
                    self._call("Allreduce", self._mpi.IN_PLACE, _view(wide), op=self._mpi.MAX)
                    chunk.copy_(wide)

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        self.all_reduce(buffer)
        return lambda: None

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        check_slices(buffer, counts=counts, rank=self.rank, num_ranks=self.num_ranks)
        host = to_host(buffer)
        mine = torch.empty(counts[self.rank], dtype=buffer.dtype)
        with self._reported("reduce_scatter"):
            for begins, widths in windows_of(counts, max_elems=self._chunk_elems):
                packed = pack(host, counts=counts, begins=begins, widths=widths)
                begin, width = begins[self.rank], widths[self.rank]
                if self._sums_slices(packed):
                    mine[begin : begin + width] = self._sum_slices(packed, counts=widths)
                else:
                    self._call(
                        "Reduce_scatter",
                        _view(packed),
                        _view(mine[begin : begin + width]),
                        recvcounts=widths,
                        op=self._mpi.SUM,
                    )
        return mine.to(buffer.device)

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        check_part(part, counts=counts, rank=self.rank, num_ranks=self.num_ranks)
        check_out(out, part=part, counts=counts, rank=self.rank)
        host = to_host(part)
        whole = torch.empty(sum(counts), dtype=part.dtype) if out is None else to_host(out)
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
        return whole if whole is out else filled(out, whole.to(part.device))

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Sends each rank its slice of `buffer`, by point-to-point messages; see `Collective.all_to_all`.

        Long buffers must be split into chunks. With Alltoallv all ranks would first have to agree on the chunks, since
        their counts differ. With messages no agreement is needed: sender and receiver both know the length of the
        slice that is sent between them, and split it into the same chunks.
        """
        check_exchange(
            buffer, send_counts=send_counts, receive_counts=receive_counts, rank=self.rank,
            num_ranks=self.num_ranks,
        )  # fmt: skip
        host = to_host(buffer)
        received = torch.empty(sum(receive_counts), dtype=buffer.dtype)
        incoming, outgoing = received.split(list(receive_counts)), host.split(list(send_counts))
        incoming[self.rank].copy_(outgoing[self.rank])
        size, longest = buffer.element_size(), max(*send_counts, *receive_counts, 0)
        most, at_once = self._chunk_elems, max(1, longest)
        if self._piece_bytes is not None:
            most, at_once = max(1, min(most, self._piece_bytes // size)), _EXCHANGED_BYTES // size
        with self._reported("all_to_all"):
            for begin in range(0, longest, at_once):
                window = slice(begin, begin + at_once)
                self._exchange(
                    [part[window] for part in incoming], [part[window] for part in outgoing], most=most
                )
        return received.to(buffer.device)

    def _exchange(
        self, incoming: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor], *, most: int
    ) -> None:
        """Sends each other rank its slice, and receives this rank's slices, in messages of at most `most` elements."""
        requests: list[Any] = []
        # In order of distance, so that not all ranks send to rank 0 at once.
        for distance in range(1, self.num_ranks):
            source = (self.rank - distance) % self.num_ranks
            requests += [
                self._comm.Irecv(_view(incoming[source][piece]), source=source, tag=ALL_TO_ALL_TAG)
                for piece in pieces(incoming[source].numel(), most=most)
            ]
        for distance in range(1, self.num_ranks):
            to = (self.rank + distance) % self.num_ranks
            requests += [
                self._comm.Isend(_view(outgoing[to][piece]), dest=to, tag=ALL_TO_ALL_TAG)
                for piece in pieces(outgoing[to].numel(), most=most)
            ]
        if self._polls:
            poll_until(lambda: self._mpi.Request.Testall(requests))
        else:
            self._mpi.Request.Waitall(requests)

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        check_buffer(buffer, operation="broadcast", rank=self.rank)
        check_root(root, rank=self.rank, num_ranks=self.num_ranks)
        with self._reported("broadcast"), on_host(buffer) as host:
            for chunk in host.split(self._chunk_elems):
                if chunk.numel():
                    self._call("Bcast", _view(chunk), root=root)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return gather_bytes(self, data)

    def barrier(self) -> None:
        with self._reported("barrier"):
            self._call("Barrier")

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles:
        return make_collective_files(self._mpi, self._members if members is None else members)

    def close(self) -> None:
        self._comm.Free()

    def _sums_slices(self, buffer: torch.Tensor) -> bool:
        """Returns True if the ranks sum `buffer` by slices (each rank sums one slice) instead of calling MPI's sum.

        MPI cannot sum half precision. Open MPI's non-blocking sums of large buffers use a tree, in which some ranks
        send the whole buffer once or twice (measured on four nodes: 1.25 and 1.33 times the bytes of a sum by slices).
        """
        large = self._polls and buffer.numel() * buffer.element_size() >= _SLICED_BYTES
        return buffer.dtype in HALF_TYPES or large

    def _sum_slices(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        """Returns this rank's slice of the sum of `buffer` over the ranks, shape (counts[rank],)."""
        if self._ring is not None and _is_exact(buffer) and self._fits_ring(buffer):
            return torch.from_numpy(self._ring.reduce_scatter(_view(buffer), counts=counts))
        width = counts[self.rank]
        received = torch.empty(self.num_ranks * width, dtype=buffer.dtype)
        self._call(
            "Alltoallv",
            [_view(buffer), (list(counts), offsets_of(counts)[:-1])],
            [_view(received), ([width] * self.num_ranks, [r * width for r in range(self.num_ranks)])],
        )
        return sum_in_order(list(received.view(self.num_ranks, width).unbind()))

    def _gather_into(self, whole: torch.Tensor, *, part: torch.Tensor, counts: Sequence[int]) -> None:
        place = whole.split(list(counts))[self.rank]
        if place.data_ptr() != part.data_ptr():
            place.copy_(part)
        if self._ring is not None and self._fits_ring(whole):
            self._ring.gather(_view(whole), counts=counts)
        else:
            whole_of = [_view(whole), (list(counts), offsets_of(counts)[:-1])]
            self._call("Allgatherv", self._mpi.IN_PLACE, whole_of)

    def _fits_ring(self, whole: torch.Tensor) -> bool:
        """Returns True if the ranks' parts of `whole` are large enough on average to be sent in a ring.

        whole: buffer with the parts of all ranks, of the same size on every rank. The result is therefore the same too.
        """
        return whole.numel() * whole.element_size() >= self.num_ranks * _RING_BYTES
