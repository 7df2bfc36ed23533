"""Synchronization, messages and shared memory of the threads that are ranks in `threads_world`."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, final

import torch

from hpctrain.comm.interface.transport import Pending
from hpctrain.errors import BufferMismatch, CommunicationError
from hpctrain.topology import Topology


class Rendezvous:
    """A barrier for the threads of one group, and a slot for each in which it passes a value to the others."""

    def __init__(self, run: ThreadsRun, *, members: tuple[int, ...]) -> None:
        self.run = run
        self.members = members
        self.barrier = threading.Barrier(len(members))
        self.laid: list[tuple[str, Any]] = [("", None)] * len(members)
        run.add(self)

    def wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise LeftError(self.run.reason or "the group was broken") from None

    def exchange(self, *, place: int, operation: str, value: Any) -> list[Any]:
        """Passes `value` to the other ranks and returns every rank's value. Collective over the group.

        Call `wait` before any of the values changes. Raises BufferMismatch on every rank if the ranks called different
        operations, LeftError if a rank has ended.
        """
        self.laid[place] = (operation, value)
        self.wait()
        laid = list(self.laid)
        called = {name for name, _ in laid}
        if len(called) > 1:
            each = ", ".join(f"rank {r} {name}" for r, (name, _) in zip(self.members, laid, strict=True))
            self.wait()
            raise BufferMismatch(f"ranks called different operations: {each}", agreed=True)
        return [value for _, value in laid]


class LeftError(CommunicationError):
    """Another rank has ended or aborted, so this one cannot continue: a consequence, never the cause."""


class ThreadsRun:
    """State of one call of `run_threads`: all its rendezvous points, so that the end of one rank ends every wait."""

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
    """Messages in flight of all ranks of one transport: copies, by source, destination and tag."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.letters: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)


@final
class _Receiving:
    """A receive in flight. Receives with equal source and tag are served in the order in which they started."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.served = False


@final
class ThreadsTransport:
    """`Transport` of one thread."""

    def __init__(
        self, rendezvous: Rendezvous, *, node: Rendezvous, mailbox: Mailbox, rank: int, topology: Topology
    ) -> None:
        """rendezvous: of all ranks. node: rendezvous of this node's ranks. mailbox: shared by all ranks."""
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
        """Does nothing: Python's lock orders its threads' memory accesses; compiled code has its own fences."""

    def begun(self, what: str) -> None:
        """Does nothing: there is no watchdog here."""

    def waits(self, what: str) -> None:
        """Raises LeftError if a rank has ended, so that no rank waits for it."""
        if self._rendezvous.run.reason:
            raise LeftError(self._rendezvous.run.reason)

    def progressed(self) -> None:
        """Does nothing: there is no watchdog here."""

    def close(self) -> None:
        self._rendezvous.exchange(
            place=self._rendezvous.members.index(self._rank), operation="close", value=None
        )
        self._rendezvous.wait()
