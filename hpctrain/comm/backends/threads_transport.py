"""Messages and shared memory between ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import final

import torch

from hpctrain.comm.backends.thread_rendezvous import LeftError, Meeting
from hpctrain.comm.interface.transport import Pending
from hpctrain.errors import CommunicationError
from hpctrain.topology import Topology


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
        self, meeting: Meeting, *, node: Meeting, mailbox: Mailbox, rank: int, topology: Topology
    ) -> None:
        """meeting: of all ranks. node: meeting of this node's ranks. mailbox: shared by all ranks."""
        self._meeting = meeting
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
        if self._meeting.run.reason:
            raise LeftError(self._meeting.run.reason)
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
        if self._meeting.run.reason:
            raise LeftError(self._meeting.run.reason)

    def progressed(self) -> None:
        """Does nothing: there is no watchdog here."""

    def close(self) -> None:
        self._meeting.exchange(place=self._meeting.members.index(self._rank), operation="close", value=None)
        self._meeting.wait()
