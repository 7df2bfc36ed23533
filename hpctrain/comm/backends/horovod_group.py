"""The collective operations over one of Horovod's process sets.

Horovod matches operations by name, so each has one that the same call on the other ranks has too: the communicator's
number and the operation's number on it. Two threads may therefore communicate at once, each on a communicator of its
own.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from hpctrain.comm.interface.buffer_checks import (
    as_rows,
    balanced_counts,
    check_buffer,
    check_counts,
    check_exchange,
    check_part,
    check_root,
    offsets_of,
    pack,
    reordered,
    widened,
    windows_of,
)
from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.communicator import Collective, ReduceOp
from hpctrain.comm.interface.gather_bytes import gather_bytes
from hpctrain.errors import BufferMismatch, CommunicationError

NAMES_IN_TURN = 64
POLL_EVERY_S = 20e-6  # the kernel makes it some 70 us


@final
class HorovodGroup:
    """The collective operations over one process set, in a space of names of its own."""

    def __init__(
        self, hvd: Any, *, process_set: Any, members: tuple[int, ...], name: str, chunk_elems: int
    ) -> None:
        """chunk_elems: of a longer buffer, so many elements go in one operation of Horovod."""
        self._hvd = hvd
        self._chunk_elems = max(chunk_elems, len(members))
        self._process_set = process_set
        self._members = members
        self._rank = members.index(hvd.rank())
        self._name = name
        self._count = itertools.count()
        # Horovod orders a process set by world rank; a group may be in any order.
        self._by_world_rank = sorted(range(len(members)), key=lambda place: members[place])
        self._in_order = self._by_world_rank == list(range(len(members)))

    @property
    def backend(self) -> str:
        return "horovod"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return len(self._members)

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def _next_name(self, operation: str) -> str:
        # Few operations are in flight here, so a name may come again; Horovod keeps what it knows of an operation by
        # name, and with ever new ones that store would only fill up, and warn.
        return f"hpctrain.{self._name}.{next(self._count) % NAMES_IN_TURN}.{operation}"

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (self._hvd.mpi_ops.HorovodInternalError, ValueError) as error:
            text = str(error)
            # Horovod compares shapes and types itself, and tells every rank.
            kind = BufferMismatch if "Mismatched" in text else CommunicationError
            raise kind(
                f"{operation} on rank {self._members[self._rank]} of {self.num_ranks}: Horovod says {text}"
            ) from error

    def _check(self, buffer: torch.Tensor, *, operation: str) -> None:
        check_buffer(buffer, operation=operation, rank=self.rank)
        if buffer.dtype is torch.bfloat16:
            raise CommunicationError(
                f"{operation} on rank {self._members[self._rank]}: Horovod has no bfloat16: use the wire "
                "format fp16 or fp32, or the backend mpi"
            )

    def _to_horovod(self, buffer: torch.Tensor) -> torch.Tensor:
        """`buffer` where Horovod can take it: a Horovod built without device support wants host memory."""
        if buffer.device.type == "cpu" or self._hvd.nccl_built():
            return buffer
        return buffer.cpu()

    def _stand_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """What is sent for an empty buffer, which Horovod cannot take: zeros in a shape that no other buffer has.

        So a rank that brings nothing where others bring something meets them, and Horovod tells all that they differ.
        """
        return self._to_horovod(torch.zeros(self.num_ranks, 1, 1, dtype=torch.int32, device=buffer.device))

    def _chunks(self, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
        """The pieces that go in one operation each, and what their operations' names end in.

        The first meets that of any other rank, so that Horovod compares them. Later ones meet only those of a buffer as
        long: else the rest of a longer one would be summed into what the others bring next.
        """
        for number, chunk in enumerate(buffer.split(self._chunk_elems)):  # an empty tensor is one empty chunk
            yield chunk, f".{buffer.numel()}" if number else ""

    def _windows(self, counts: Sequence[int]) -> Iterator[tuple[list[int], list[int], str]]:
        """As `windows_of`, of slices padded to the widest one, as Horovod wants them; and the end of the name."""
        padded = [max(counts)] * len(counts)
        for number, (begins, widths) in enumerate(windows_of(padded, max_elems=self._chunk_elems)):
            ends = [
                min(begin + width, count) for begin, width, count in zip(begins, widths, counts, strict=True)
            ]
            begins = [min(begin, count) for begin, count in zip(begins, counts, strict=True)]
            widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
            yield begins, widths, f".{sum(counts)}" if number else ""

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        """As the contract says; float16 is summed in float16. MAX of NaN is whatever MPI makes of it."""
        self._check(buffer, operation="all_reduce")
        for chunk, end in self._chunks(buffer):
            given = widened(self._to_horovod(chunk), op=op) if chunk.numel() else self._stand_in(chunk)
            with self._reported("all_reduce"):
                result = self._hvd.allreduce_(
                    given,
                    name=self._next_name(f"all_reduce.{op.value}{end}"),
                    op=self._hvd.Sum if op is ReduceOp.SUM else self._hvd.Max,
                    process_set=self._process_set,
                )
            if result is not chunk and chunk.numel():
                chunk.copy_(result)

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        """As the contract says. What is started together goes in one cycle of Horovod's thread, not in one each."""
        given = self._to_horovod(buffer)
        if given is not buffer or not 0 < buffer.numel() <= self._chunk_elems:
            self.all_reduce(buffer)
            return lambda: None
        self._check(buffer, operation="all_reduce")
        with self._reported("all_reduce"):
            handle = self._hvd.allreduce_async_(
                buffer,
                name=f"hpctrain.{self._name}.started.{number}",
                op=self._hvd.Sum,
                process_set=self._process_set,
            )

        def wait() -> None:
            # Horovod's own wait polls without a pause, on the core that Horovod's thread needs: digits on 2 ranks and 2
            # cores trained at 5,000 samples/s with it and at 6,000 so.
            while not self._hvd.poll(handle):
                time.sleep(POLL_EVERY_S)
            with self._reported("all_reduce"):
                self._hvd.synchronize(handle)

        return wait

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        self._check(buffer, operation="reduce_scatter")
        check_counts(
            buffer.numel(),
            counts=counts,
            operation="reduce_scatter",
            rank=self.rank,
            num_ranks=self.num_ranks,
        )
        if len(counts) * max(counts) <= self._chunk_elems:
            return self._sum_slices(buffer, counts=counts)
        mine = buffer.new_empty(counts[self.rank])
        for begins, widths, name_end in self._windows(counts):
            begin, end = begins[self.rank], begins[self.rank] + widths[self.rank]
            packed = pack(buffer, counts=counts, begins=begins, widths=widths)
            mine[begin:end] = self._sum_slices(packed, counts=widths, name_end=name_end)
        return mine

    def _sum_slices(self, buffer: torch.Tensor, *, counts: Sequence[int], name_end: str = "") -> torch.Tensor:
        """`reduce_scatter` in one operation."""
        staged = widened(self._to_horovod(buffer), op=ReduceOp.SUM)
        if buffer.numel() == 0:
            rows = self._stand_in(buffer)
        elif self._in_order and list(counts) == balanced_counts(buffer.numel(), num_parts=self.num_ranks):
            rows = staged  # Horovod gives the first ranks one more, as `balanced_counts` does
        else:
            # Horovod only splits evenly: a row for each rank, as wide as the widest slice.
            rows = as_rows(staged, counts=counts, order=self._by_world_rank)
        with self._reported("reduce_scatter"):
            handle = self._hvd.reducescatter_async(
                rows,
                name=self._next_name(f"reduce_scatter{name_end}"),
                op=self._hvd.Sum,
                process_set=self._process_set,
            )
            result = self._hvd.synchronize(handle)
        if buffer.numel() == 0:
            return buffer.clone()
        return result.view(-1)[: counts[self.rank]].to(buffer.device, buffer.dtype)

    def all_gather(self, part: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        check_part(part, counts=counts, rank=self.rank, num_ranks=self.num_ranks)
        self._check(part, operation="all_gather")
        if sum(counts) <= self._chunk_elems:
            return self._gather(part, counts=counts)
        whole, offsets = part.new_empty(sum(counts)), offsets_of(counts)
        for begins, widths, name_end in self._windows(counts):
            piece = part[begins[self.rank] : begins[self.rank] + widths[self.rank]]
            received_all = self._gather(piece, counts=widths, name_end=name_end)
            for place, received in enumerate(received_all.split(widths)):
                begin = offsets[place] + begins[place]
                whole[begin : begin + widths[place]] = received
        return whole

    def _gather(self, part: torch.Tensor, *, counts: Sequence[int], name_end: str = "") -> torch.Tensor:
        """`all_gather` in one operation."""
        given = self._to_horovod(part) if sum(counts) else self._stand_in(part)
        with self._reported("all_gather"):
            handle = self._hvd.allgather_async(
                given, name=self._next_name(f"all_gather{name_end}"), process_set=self._process_set
            )
            whole = self._hvd.synchronize(handle)
        if sum(counts) == 0:
            return part.clone()
        if whole.numel() != sum(counts):
            raise BufferMismatch(
                f"all_gather on rank {self._members[self._rank]}: counts {list(counts)} add up to "
                f"{sum(counts)}, the ranks brought {whole.numel()} elements"
            )
        if not self._in_order:
            whole = reordered(whole, counts=counts, order=self._by_world_rank)
        return whole.to(part.device)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """As the contract says. Horovod counts in 32 bits: at most 2^31 - 1 elements each way."""
        check_exchange(
            buffer, send_counts=send_counts, receive_counts=receive_counts, rank=self.rank,
            num_ranks=self.num_ranks,
        )  # fmt: skip
        self._check(buffer, operation="all_to_all")
        if max(sum(send_counts), sum(receive_counts)) >= 2**31:
            raise CommunicationError(
                f"all_to_all on rank {self._members[self._rank]}: {sum(send_counts)} elements to send and "
                f"{sum(receive_counts)} to receive, Horovod takes less than 2^31: send them in parts"
            )
        staged = self._to_horovod(buffer)
        splits = list(send_counts)
        if not self._in_order:
            staged = torch.cat([staged.split(splits)[place] for place in self._by_world_rank])
            splits = [send_counts[place] for place in self._by_world_rank]
        with self._reported("all_to_all"):
            handle = self._hvd.alltoall_async(
                staged,
                splits=torch.tensor(splits, dtype=torch.int32),
                name=self._next_name("all_to_all"),
                process_set=self._process_set,
            )
            received, found = self._hvd.synchronize(handle)
        if found.tolist() != [receive_counts[place] for place in self._by_world_rank]:
            raise BufferMismatch(
                f"all_to_all on rank {self._members[self._rank]}: it expects {list(receive_counts)} elements "
                f"of the ranks, they sent (by world rank) {found.tolist()}"
            )
        if not self._in_order:
            received = reordered(received, counts=receive_counts, order=self._by_world_rank)
        return received.to(buffer.device)

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        self._check(buffer, operation="broadcast")
        check_root(root, rank=self.rank, num_ranks=self.num_ranks)
        for chunk, end in self._chunks(buffer):
            given = self._to_horovod(chunk) if chunk.numel() else self._stand_in(chunk)
            with self._reported("broadcast"):
                result = self._hvd.broadcast_(
                    given,
                    self._members[root],  # Horovod counts roots by world rank, also in a process set
                    name=self._next_name(f"broadcast{end}"),
                    process_set=self._process_set,
                )
            if result is not chunk and chunk.numel():
                chunk.copy_(result)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return gather_bytes(self, data)

    def barrier(self) -> None:
        """A sum of one int: Horovod's own barrier has no name, so two threads' barriers could be mixed up."""
        self.all_reduce(torch.zeros(1, dtype=torch.int32))

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
        """MPI's, where Horovod runs over it."""
        from hpctrain.comm.backends.mpi_world import open_collective_files

        if not all_have_mpi(self._hvd, self):
            return None
        return open_collective_files(self._members if members is None else members)


def all_have_mpi(hvd: Any, group: Collective) -> bool:
    """Whether Horovod runs over MPI, and mpi4py can be used beside it, on all of the group's ranks. Collective."""
    from hpctrain.comm.backends.mpi_world import can_open_transport

    mine = bool(hvd.mpi_enabled()) and can_open_transport()
    return all(answer == b"1" for answer in group.all_gather_bytes(b"1" if mine else b"0"))
