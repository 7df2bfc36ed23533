"""A world whose ranks are threads of one process, to test algorithms in milliseconds without a launcher.

In each operation the ranks meet at a barrier, read each other's buffers, compute their results in rank order, and meet
again before they continue. Results are deterministic; speed is not a goal.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, final

import numpy as np
import torch

from hpctrain.comm.interface.buffer_checks import (
    check_buffer,
    check_exchange,
    check_groups,
    check_out,
    check_part,
    check_root,
    check_slices,
    filled,
    maximum_of,
    offsets_of,
    sum_in_order,
)
from hpctrain.comm.interface.collective_files import CollectiveFiles, LocalFiles
from hpctrain.comm.interface.communicator import Attributes, Collective, Forwarding, ReduceOp
from hpctrain.comm.interface.remote_memory import RemoteMemory, SharedRemoteMemory
from hpctrain.comm.interface.transport import Pending, Transport
from hpctrain.errors import BufferMismatch, CommunicationError, HpctrainError, from_exit_code
from hpctrain.topology import Topology


class Rendezvous:
    """A barrier for the threads of one group. Each thread has a slot through which it passes a value to the others."""

    def __init__(self, run: ThreadsRun, *, members: tuple[int, ...]) -> None:
        self.run = run
        self.members = members
        self.barrier = threading.Barrier(len(members))
        self.contributions: list[tuple[str, Any]] = [("", None)] * len(members)
        run.add(self)

    def wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise LeftError(self.run.reason or "the group was broken") from None

    def exchange(self, *, place: int, operation: str, value: Any) -> list[Any]:
        """Passes `value` to the other ranks and returns every rank's value. Collective over the group.

        Call `wait` before any of the values changes. Raises BufferMismatch on every rank if the ranks called different
        operations, and LeftError if a rank has ended.
        """
        self.contributions[place] = (operation, value)
        self.wait()
        contributions = list(self.contributions)
        called = {name for name, _ in contributions}
        if len(called) > 1:
            each = ", ".join(
                f"rank {r} {name}" for r, (name, _) in zip(self.members, contributions, strict=True)
            )
            self.wait()
            raise BufferMismatch(f"ranks called different operations: {each}", agreed=True)
        return [value for _, value in contributions]


class LeftError(CommunicationError):
    """Another rank has ended or aborted, so this rank cannot continue. This is never the cause of a failure."""


class ThreadsRun:
    """State of one call of `run_threads`.

    When a rank ends, it breaks all barriers, so that no other rank waits forever.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.exit_code: int | None = None
        self._rendezvous_points: list[Rendezvous] = []
        self._lock = threading.Lock()

    def add(self, rendezvous: Rendezvous) -> None:
        with self._lock:
            self._rendezvous_points.append(rendezvous)
            if self.reason:
                rendezvous.barrier.abort()

    def end(self, reason: str) -> None:
        with self._lock:
            self.reason = self.reason or reason
            for rendezvous in self._rendezvous_points:
                rendezvous.barrier.abort()


@final
class Mailbox:
    """Copies of all messages in flight between the ranks of one transport, by source, destination and tag."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.letters: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)


@final
class _Receiving:
    """A receive in flight. Receives with the same source and tag are served in the order in which they were started."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.served = False


@final
class ThreadsTransport:
    """`Transport` of one thread."""

    def __init__(
        self, rendezvous: Rendezvous, *, node: Rendezvous, mailbox: Mailbox, rank: int, topology: Topology
    ) -> None:
        """Creates one rank's transport.

        rendezvous: rendezvous of all ranks.
        node: rendezvous of the ranks of this node.
        mailbox: messages in flight, shared by all ranks.
        """
        self._rendezvous = rendezvous
        self._node = node
        self._mailbox = mailbox
        self._rank = rank
        self._topology = topology
        self._waiting: dict[tuple[int, int, int], deque[_Receiving]] = defaultdict(deque)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def topology(self) -> Topology:
        return self._topology

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        with self._mailbox.lock:
            self._mailbox.letters[self._rank, to, tag].append(buffer.clone())
        return None

    def receive(self, buffer: torch.Tensor, *, source: int, tag: int) -> Pending:
        receiving = _Receiving(buffer)
        self._waiting[source, self._rank, tag].append(receiving)
        return receiving

    def all_done(self, pending: Sequence[Pending]) -> bool:
        for key in [key for key, queue in self._waiting.items() if queue]:
            with self._mailbox.lock:
                letters = self._mailbox.letters[key]
                while letters and self._waiting[key]:
                    receiving, letter = self._waiting[key].popleft(), letters.popleft()
                    if receiving.buffer.numel() != letter.numel():
                        raise CommunicationError(
                            f"rank {self._rank} expects {receiving.buffer.numel()} bytes, but rank {key[0]} sent "
                            f"{letter.numel()} (tag {key[2]})"
                        )
                    receiving.buffer.copy_(letter)
                    receiving.served = True
        if all(one is None or one.served for one in pending):
            return True
        if self._rendezvous.run.reason:
            raise LeftError(self._rendezvous.run.reason)
        return False

    def share(self, num_bytes: int) -> list[torch.Tensor]:
        place = self._node.members.index(self._rank)
        mine = torch.zeros(num_bytes, dtype=torch.uint8)
        segments = self._node.exchange(place=place, operation="share", value=mine)
        self._node.wait()
        return list(segments)

    def fence(self) -> None:
        """Does nothing: Python's lock orders its threads' memory accesses, and compiled code has its own fences."""

    def begun(self, what: str) -> None:
        """Does nothing: this transport has no watchdog."""

    def waits(self, what: str) -> None:
        """Raises LeftError if a rank has ended, so that no rank waits for it."""
        if self._rendezvous.run.reason:
            raise LeftError(self._rendezvous.run.reason)

    def progressed(self) -> None:
        """Does nothing: this transport has no watchdog."""

    def close(self) -> None:
        self._rendezvous.exchange(
            place=self._rendezvous.members.index(self._rank), operation="close", value=None
        )
        self._rendezvous.wait()


# N ranks as threads of one process, to test algorithms in milliseconds, without a launcher.


T = TypeVar("T")

# With NumPy 1, PyTorch 2.3 may wait forever if its first conversion of an array comes from two threads at once.
torch.from_numpy(np.empty(0))


def _same(tensors: Sequence[torch.Tensor], *, operation: str, members: Sequence[int]) -> str | None:
    """Returns an error message if the ranks' buffers differ in length or dtype, otherwise None."""
    if len({(t.numel(), t.dtype) for t in tensors}) == 1:
        return None
    each = ", ".join(f"rank {r} {t.numel()} x {t.dtype}" for r, t in zip(members, tensors, strict=True))
    return f"{operation} with different buffers: {each}"


@final
class ThreadsGroup(Attributes):
    """One thread's communicator over a group of threads."""

    def __init__(self, rendezvous: Rendezvous, *, place: int) -> None:
        self._rendezvous = rendezvous
        self._place = place

    @property
    def backend(self) -> str:
        return "threads"

    @property
    def rank(self) -> int:
        return self._place

    @property
    def num_ranks(self) -> int:
        return len(self._rendezvous.members)

    @property
    def members(self) -> tuple[int, ...]:
        return self._rendezvous.members

    def _tensors(self, operation: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensors = self._rendezvous.exchange(place=self._place, operation=operation, value=tensor)
        wrong = _same(tensors, operation=operation, members=self.members)
        if wrong:
            self._rendezvous.wait()
            raise BufferMismatch(wrong, agreed=True)
        return tensors

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        check_buffer(buffer, operation="all_reduce", rank=self.rank)
        tensors = self._tensors(f"all_reduce {op.value}", buffer)
        result = sum_in_order(tensors) if op is ReduceOp.SUM else maximum_of(tensors)
        self._rendezvous.wait()  # no rank writes before all have read
        buffer.copy_(result)

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        self.all_reduce(buffer)
        return lambda: None

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        check_slices(buffer, counts=counts, rank=self.rank, num_ranks=self.num_ranks)
        begin, end = offsets_of(counts)[self.rank : self.rank + 2]
        tensors = self._tensors(f"reduce_scatter {list(counts)}", buffer)
        result = sum_in_order([tensor[begin:end] for tensor in tensors])
        self._rendezvous.wait()
        return result

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        check_part(part, counts=counts, rank=self.rank, num_ranks=self.num_ranks)
        check_out(out, part=part, counts=counts, rank=self.rank)
        parts = self._rendezvous.exchange(
            place=self._place, operation=f"all_gather {list(counts)} {part.dtype}", value=part
        )
        result = torch.cat(parts)
        self._rendezvous.wait()
        return filled(out, result)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        check_exchange(
            buffer, send_counts=send_counts, receive_counts=receive_counts, rank=self.rank,
            num_ranks=self.num_ranks,
        )  # fmt: skip
        contributions = self._rendezvous.exchange(
            place=self._place,
            operation=f"all_to_all {buffer.dtype}",
            value=buffer.split(list(send_counts)),
        )
        result = torch.cat([slices[self.rank] for slices in contributions])
        found = [slices[self.rank].numel() for slices in contributions]
        self._rendezvous.wait()
        if found != list(receive_counts):
            raise BufferMismatch(
                f"all_to_all on rank {self.rank}: it expects {list(receive_counts)} elements from the ranks, "
                f"but they sent {found}"
            )
        return result

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        check_buffer(buffer, operation="broadcast", rank=self.rank)
        check_root(root, rank=self.rank, num_ranks=self.num_ranks)
        source = self._tensors(f"broadcast from {root}", buffer)[root]
        if self.rank != root:
            buffer.copy_(source)
        self._rendezvous.wait()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        parts = self._rendezvous.exchange(place=self._place, operation="all_gather_bytes", value=bytes(data))
        self._rendezvous.wait()
        return parts

    def barrier(self) -> None:
        self._rendezvous.exchange(place=self._place, operation="barrier", value=None)
        self._rendezvous.wait()

    def collective_files(self, *, members: Sequence[int] | None = None) -> CollectiveFiles:
        return LocalFiles()

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


@final
class ThreadsWorld(Forwarding):
    """One thread's view of the world of all threads of a `run_threads` call."""

    def __init__(self, rendezvous: Rendezvous, *, rank: int) -> None:
        self._rendezvous = rendezvous
        self._group = ThreadsGroup(rendezvous, place=rank)

    @property
    def reduction_backend(self) -> str:
        return self.backend

    def open_reduction_world(self) -> ThreadsWorld:
        made = Rendezvous(self._rendezvous.run, members=self.members) if self.rank == 0 else None
        contributions = self._rendezvous.exchange(
            place=self.rank, operation="open_reduction_world", value=made
        )
        self._rendezvous.wait()
        return ThreadsWorld(contributions[0], rank=self.rank)

    def split(self, groups: Sequence[Sequence[int]]) -> Collective | None:
        check_groups(groups, num_ranks=self.num_ranks)
        same = tuple(tuple(group) for group in groups)
        # Rank 0 makes the objects; the others receive them.
        made = [Rendezvous(self._rendezvous.run, members=g) for g in same] if self.rank == 0 else None
        contributions = self._rendezvous.exchange(place=self.rank, operation=f"split {same}", value=made)
        self._rendezvous.wait()
        for rendezvous in contributions[0]:
            if self.rank in rendezvous.members:
                return ThreadsGroup(rendezvous, place=rendezvous.members.index(self.rank))
        return None

    def duplicate(self) -> Collective:
        group = self.split([self.members])
        if group is None:
            raise CommunicationError(f"rank {self.rank} is not a member of its own world")
        return group

    def transport(self, topology: Topology) -> Transport:
        nodes = topology.groups("local")
        made = (
            (Mailbox(), [Rendezvous(self._rendezvous.run, members=g) for g in nodes])
            if self.rank == 0
            else None
        )
        contributions = self._rendezvous.exchange(place=self.rank, operation=f"transport {nodes}", value=made)
        self._rendezvous.wait()
        mailbox, rendezvous_points = contributions[0]
        return ThreadsTransport(
            self._rendezvous, node=rendezvous_points[topology.node_of(self.rank)], mailbox=mailbox, rank=self.rank,
            topology=topology,
        )  # fmt: skip

    def remote_memory(self, num_bytes: int) -> RemoteMemory:
        mine = np.zeros(num_bytes, dtype=np.uint8), threading.Lock()
        given = self._rendezvous.exchange(place=self.rank, operation="remote_memory", value=mine)
        self._rendezvous.wait()
        return SharedRemoteMemory(
            parts=[part for part, _ in given], rank=self.rank, barrier=self._group.barrier, lock=given[0][1]
        )

    def abort(self, exit_code: int) -> NoReturn:
        """Ends the waits of all ranks, raising LeftError; `run_threads` then raises the error class of `exit_code`."""
        run = self._rendezvous.run
        run.exit_code = exit_code
        run.end(f"rank {self.rank} ended the run with exit code {exit_code}")
        raise LeftError(run.reason)

    def close(self) -> None:
        self._group.barrier()


def run_threads(num_ranks: int, function: Callable[[ThreadsWorld], T], *, timeout_s: float = 60) -> list[T]:
    """Runs `function(world)` on `num_ranks` threads of this process, one per rank, and returns their results by rank.

    An exception on one rank ends the waits of all other ranks, and is raised here. If several ranks failed, the
    exception of the lowest rank is raised. Raises CommunicationError, with the stacks of the unfinished ranks, after
    `timeout_s` seconds.
    """
    run = ThreadsRun()
    rendezvous = Rendezvous(run, members=tuple(range(num_ranks)))
    results: list[Any] = [None] * num_ranks
    failures: dict[int, BaseException] = {}

    def rank_main(rank: int) -> None:
        try:
            results[rank] = function(ThreadsWorld(rendezvous, rank=rank))
        except BaseException as error:
            failures[rank] = error
            # An agreed error is raised on every rank anyway, so no rank is left waiting.
            if not (isinstance(error, HpctrainError) and error.agreed):
                run.end(f"rank {rank} ended with {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = {rank: thread for rank, thread in enumerate(threads) if thread.is_alive()}
    if late:
        message = f"ranks {sorted(late)} have not ended after {timeout_s:g} s"
        stacks = _stacks(late)
        run.end(message)
        raise CommunicationError(f"{message}\n{stacks}")
    causes = [failures[rank] for rank in sorted(failures) if not isinstance(failures[rank], LeftError)]
    if causes:
        raise causes[0]
    if run.exit_code is not None:
        raise from_exit_code(run.exit_code)(run.reason, agreed=True)
    if failures:
        raise failures[min(failures)]
    return results


def _stacks(threads: dict[int, threading.Thread]) -> str:
    frames = sys._current_frames()
    parts = []
    for rank, thread in threads.items():
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            parts.append(f"rank {rank}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)
