"""Counts the bytes that a rank sends to other nodes through communicators that count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch

from hpctrain.comm.collectives.two_level import TwoLevel
from hpctrain.comm.interface.communicator import Collective, ReduceOp
from hpctrain.comm.interface.peer_messages import PeerMessages
from hpctrain.comm.interface.transport import Pending
from hpctrain.comm.interface.world_forwarding import Forwarding
from hpctrain.topology import Topology


@final
class Traffic:
    """Payload that this rank has sent to other nodes, in bytes, as it travels. Any thread may count.

    Slices of an all-to-all and messages are counted by their receivers. Other operations are counted for a ring over
    the group's ranks, in which a rank sends to the next one only: no algorithm sends less from each rank.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._lock = threading.Lock()
        self._num_bytes = 0

    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes

    def counted(self, comm: Collective) -> Collective:
        """Returns `comm`, counted here; it must not be used by itself any more. Not collective."""
        return _CountedGroup(comm, traffic=self, elsewhere=self._elsewhere(comm))

    def counted_levels(self, levels: TwoLevel) -> TwoLevel:
        """Returns both communicators of `levels`, counted here. Not collective."""
        cross = self.counted(levels.cross) if levels.cross is not None else None
        return replace(levels, local=self.counted(levels.local), cross=cross)

    def counted_messages(self, messages: PeerMessages, *, comm: Collective) -> PeerMessages:
        """Returns `messages` between the ranks of `comm`, counted here. Not collective."""
        return _CountedMessages(messages, traffic=self, elsewhere=self._elsewhere(comm))

    def _elsewhere(self, comm: Collective) -> list[bool]:
        """For each rank of the group, whether it is on another node than this one."""
        node = self._topology.node_of(comm.members[comm.rank])
        return [self._topology.node_of(member) != node for member in comm.members]


@final
class _CountedGroup(Forwarding):
    def __init__(self, comm: Collective, *, traffic: Traffic, elsewhere: Sequence[bool]) -> None:
        self._group = comm
        self._traffic = traffic
        self._elsewhere = elsewhere
        self._next = (comm.rank + 1) % comm.num_ranks

    def all_reduce(self, buffer: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM) -> None:
        self._count(2 * buffer.numel() * (self.num_ranks - 1) // self.num_ranks, buffer)
        super().all_reduce(buffer, op=op)

    def start_all_reduce(self, buffer: torch.Tensor, *, number: int) -> Callable[[], None]:
        self._count(2 * buffer.numel() * (self.num_ranks - 1) // self.num_ranks, buffer)
        return super().start_all_reduce(buffer, number=number)

    def reduce_scatter(self, buffer: torch.Tensor, *, counts: Sequence[int]) -> torch.Tensor:
        self._count(sum(counts) - counts[self.rank], buffer)
        return super().reduce_scatter(buffer, counts=counts)

    def all_gather(
        self, part: torch.Tensor, *, counts: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._count(sum(counts) - counts[self._next], part)
        return super().all_gather(part, counts=counts, out=out)

    def broadcast(self, buffer: torch.Tensor, *, root: int) -> None:
        self._count(buffer.numel() if self._next != root else 0, buffer)
        super().broadcast(buffer, root=root)

    def all_to_all(
        self, buffer: torch.Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        far = sum(count for count, counts in zip(send_counts, self._elsewhere, strict=True) if counts)
        self._traffic.add(far * buffer.element_size())
        return super().all_to_all(buffer, send_counts=send_counts, receive_counts=receive_counts)

    def _count(self, num_elems: int, buffer: torch.Tensor) -> None:
        if self._elsewhere[self._next]:
            self._traffic.add(num_elems * buffer.element_size())


@final
class _CountedMessages:
    def __init__(self, messages: PeerMessages, *, traffic: Traffic, elsewhere: Sequence[bool]) -> None:
        self._messages = messages
        self._traffic = traffic
        self._elsewhere = elsewhere

    def send(self, buffer: torch.Tensor, *, to: int, tag: int) -> Pending:
        if self._elsewhere[to]:
            self._traffic.add(buffer.numel())
        return self._messages.send(buffer, to=to, tag=tag)

    def receive(self, buffer: torch.Tensor, *, source: int | None, tag: int) -> Pending:
        return self._messages.receive(buffer, source=source, tag=tag)

    def finished(self, pending: Pending) -> bool:
        return self._messages.finished(pending)

    def wait(self, pending: Pending, *, what: str) -> None:
        self._messages.wait(pending, what=what)

    def source_of(self, pending: Pending) -> int:
        return self._messages.source_of(pending)

    def close(self) -> None:
        self._messages.close()
