"""The collective operations over one of Horovod's process sets.

Horovod matches the ranks' operations by name. A name consists of the communicator's number and the number of the
operation on it, so two threads can communicate at the same time, each on its own communicator.
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
    check_buffer,
    check_exchange,
    check_out,
    check_part,
    check_root,
    check_slices,
    filled,
    gather_bytes,
    offsets_of,
    pack,
    reordered,
    widened,
    windows_of,
)
from hpctrain.comm.interface.collective_files import CollectiveFiles
from hpctrain.comm.interface.communicator import Attributes, Collective, ReduceOp
from hpctrain.errors import BufferMismatch, CommunicationError
from hpctrain.storage import split_evenly

NAMES_IN_TURN = 64
# Pauses of a rank that waits for a sum: a share of the time that it has waited, within these limits. 8 ranks on 2 cores
# that paused for 20 us each time woke up 3,000 times per step, which cost a quarter of their computing time.
SHORTEST_PAUSE_S = 20e-6  # the kernel rounds it up to about 70 us
LONGEST_PAUSE_S = 2e-3
PAUSE_SHARE = 0.1


@final
class HorovodGroup(Attributes):
    """Collective operations over one process set, with a separate range of operation names."""

    def __init__(
        self, hvd: Any, *, process_set: Any, members: tuple[int, ...], name: str, chunk_elems: int
    ) -> None:
        """Creates the communicator.

        name: prefix of the operation names, the same on all members and unique among communicators.
        chunk_elems: largest number of elements in one Horovod operation; longer buffers are split.
        """
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
        # Names are reused, as few operations are in flight: Horovod caches operations by name, and with always new
        # names that cache would fill up, with a warning.
        return f"hpctrain.{self._name}.{next(self._count) % NAMES_IN_TURN}.{operation}"

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except (self._hvd.mpi_ops.HorovodInternalError, ValueError) as error:
            text = str(error)
            # Horovod compares shapes and types itself, and reports differences on every rank.
            kind = BufferMismatch if "Mismatched" in text else CommunicationError
            raise kind(
                f"{operation} on rank {self._members[self._rank]} of {self.num_ranks}: Horovod reported {text}"
            ) from error

    def _check(self, buffer: torch.Tensor, *, operation: str) -> None:
        check_buffer(buffer, operation=operation, rank=self.rank)
        if buffer.dtype is torch.bfloat16:
            raise CommunicationError(
                f"{operation} on rank {self._members[self._rank]}: Horovod does not support bfloat16: use the wire "
                "format fp16 or fp32, or the backend mpi"
            )

    def _to_horovod(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns `buffer` itself, or a copy in host memory if Horovod is built without NCCL."""
        if buffer.device.type == "cpu" or self._hvd.nccl_built():
            return buffer
        return buffer.cpu()

    def _stand_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns a placeholder for an empty buffer, which Horovod rejects: zeros in a shape that no other buffer has.

        If the buffers of other ranks are not empty, Horovod then reports the difference of shapes on all ranks.
        """
        return self._to_horovod(torch.zeros(self.num_ranks, 1, 1, dtype=torch.int32, device=buffer.device))

    def _chunks(self, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
        """Yields (chunk, suffix) per Horovod operation: a chunk of `buffer`, and the suffix of the operation's name.

        The first operation has no suffix, so that Horovod compares its chunk with the other ranks' buffers. The suffix
        of later operations contains the buffer's length: otherwise the rest of a longer buffer would be matched with
        the next operation of the other ranks.
        """
        for number, chunk in enumerate(buffer.split(self._chunk_elems)):  # an empty tensor is one empty chunk
            yield chunk, f".{buffer.numel()}" if number else ""

    def _windows(self, counts: Sequence[int]) -> Iterator[tuple[list[int], list[int], str]]:
        """Splits slices that are too long for one Horovod operation; yields what each operation transfers.

        Each item has the start and the width of the piece of every rank's slice (see `windows_of`), and the suffix of
        the operation's name. Horovod pads all slices to the widest one, so the padded slices must fit into the limit.

        counts: number of elements in each rank's slice.
        """
        padded = [max(counts)] * len(counts)
        for number, (begins, widths) in enumerate(windows_of(padded, max_elems=self._chunk_elems)):
            ends = [
                min(begin + width, count) for begin, width, count in zip(begins, widths, counts, strict=True)
            ]
            begins = [min(begin, count) for begin, count in zip(begins, counts, strict=True)]
            widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
            yield begins, widths, f".{sum(counts)}" if number else ""

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        """Reduces `buffer` over the ranks, in place; see `Collective.all_reduce`.

        float16 is summed in float16. MAX of buffers with NaN depends on the MPI library.
        """
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
        """Starts summing `buffer` over the ranks, in place; see `Collective.start_all_reduce`.

        Sums that are started together share one cycle of Horovod's thread.
        """
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
            # cores trained at 5,000 samples/s with it and at 6,000 with this loop.
            began = time.perf_counter()
            while not self._hvd.poll(handle):
                pause_s = PAUSE_SHARE * (time.perf_counter() - began)
                time.sleep(min(max(SHORTEST_PAUSE_S, pause_s), LONGEST_PAUSE_S))
            with self._reported("all_reduce"):
                self._hvd.synchronize(handle)

        return wait

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        self._check(buffer, operation="reduce_scatter")
        check_slices(buffer, counts=counts, rank=self.rank, num_ranks=self.num_ranks)
        if len(counts) * max(counts) <= self._chunk_elems:
            return self._sum_slices(buffer, counts=counts)
        mine = buffer.new_empty(counts[self.rank])
        for begins, widths, name_end in self._windows(counts):
            begin, end = begins[self.rank], begins[self.rank] + widths[self.rank]
            packed = pack(buffer, counts=counts, begins=begins, widths=widths)
            mine[begin:end] = self._sum_slices(packed, counts=widths, name_end=name_end)
        return mine

    def _sum_slices(self, buffer: torch.Tensor, *, counts: Sequence[int], name_end: str = "") -> torch.Tensor:
        """Runs `reduce_scatter` as one Horovod operation."""
        staged = widened(self._to_horovod(buffer), op=ReduceOp.SUM)
        if buffer.numel() == 0:
            rows = self._stand_in(buffer)
        elif self._in_order and list(counts) == split_evenly(buffer.numel(), num_parts=self.num_ranks):
            rows = staged  # Horovod splits as `split_evenly` does
        else:
            # Horovod only splits evenly: one row per rank, padded to the widest slice.
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

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        check_part(part, counts=counts, rank=self.rank, num_ranks=self.num_ranks)
        check_out(out, part=part, counts=counts, rank=self.rank)
        self._check(part, operation="all_gather")
        if sum(counts) <= self._chunk_elems:
            return filled(out, self._gather(part, counts=counts))
        # Not into `out`: `part` may be a slice of it, which must not be overwritten before all of it is sent.
        whole, offsets = part.new_empty(sum(counts)), offsets_of(counts)
        for begins, widths, name_end in self._windows(counts):
            piece = part[begins[self.rank] : begins[self.rank] + widths[self.rank]]
            received_all = self._gather(piece, counts=widths, name_end=name_end)
            for place, received in enumerate(received_all.split(widths)):
                begin = offsets[place] + begins[place]
                whole[begin : begin + widths[place]] = received
        return filled(out, whole)

    def _gather(self, part: torch.Tensor, *, counts: Sequence[int], name_end: str = "") -> torch.Tensor:
        """Runs `all_gather` as one Horovod operation."""
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
                f"{sum(counts)}, but the ranks passed {whole.numel()} elements"
            )
        if not self._in_order:
            whole = reordered(whole, counts=counts, order=self._by_world_rank)
        return whole.to(part.device)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        """Sends each rank its slice of `buffer`; see `Collective.all_to_all`.

        Raises CommunicationError for 2^31 elements or more, Horovod's limit.
        """
        check_exchange(
            buffer, send_counts=send_counts, receive_counts=receive_counts, rank=self.rank,
            num_ranks=self.num_ranks,
        )  # fmt: skip
        self._check(buffer, operation="all_to_all")
        if max(sum(send_counts), sum(receive_counts)) >= 2**31:
            raise CommunicationError(
                f"all_to_all on rank {self._members[self._rank]}: {sum(send_counts)} elements to send and "
                f"{sum(receive_counts)} to receive, but Horovod allows less than 2^31: send them in parts"
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
                f"from the ranks, but they sent (by world rank) {found.tolist()}"
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
                    self._members[root],  # Horovod numbers roots by world rank, also in a process set
                    name=self._next_name(f"broadcast{end}"),
                    process_set=self._process_set,
                )
            if result is not chunk and chunk.numel():
                chunk.copy_(result)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return gather_bytes(self, data)

    def close(self) -> None:
        """Does nothing: Horovod frees its process sets when it stops."""

    def barrier(self) -> None:
        """Waits for all ranks by summing one int.

        Horovod's own barrier has no name, so the barriers of two threads could be mixed up.
        """
        self.all_reduce(torch.zeros(1, dtype=torch.int32))

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles | None:
        """Returns MPI's collective files if Horovod runs over MPI, otherwise None."""
        from hpctrain.comm.backends.mpi_world import open_collective_files

        if not all_have_mpi(self._hvd, self):
            return None
        return open_collective_files(self._members if members is None else members)


def all_have_mpi(hvd: Any, group: Collective) -> bool:
    """Returns True if, on all ranks of `group`, Horovod runs over MPI and mpi4py can share that MPI. Collective."""
    from hpctrain.comm.backends.mpi_world import can_open_transport

    mine = bool(hvd.mpi_enabled()) and can_open_transport()
    return all(answer == b"1" for answer in group.all_gather_bytes(b"1" if mine else b"0"))
