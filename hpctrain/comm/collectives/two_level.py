"""Two-level reduction for every backend: reduce within each node, then between nodes, then gather within each node.

Each element leaves a node once, instead of once from every rank of the node, and the ranks of the node share the
sending. `Traffic` counts the bytes that a rank sends to other nodes.

Source: Jia et al. 2018, arXiv:1807.11205; Mikami et al. 2018, arXiv:1811.05233 (the 2-D torus is the same scheme over
two axes).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from hpctrain.comm.interface.communicator import Collective, Forwarding, ReduceOp, World
from hpctrain.comm.interface.transport import PeerMessages, Pending
from hpctrain.errors import CommunicationError, TopologyError
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevel:
    """The two communicators of one rank for two-level reduction.

    local: communicator of the ranks of this node.
    cross: communicator of the ranks with the same local index as this rank, one on each node; None if some node has no
    rank with that index.
    num_slices: number of ranks on the smallest node, which is the number of `cross` groups.
    """

    local: Collective
    cross: Collective | None
    num_slices: int

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """Sums `buffer`, shape (n,), over all ranks, in place; see `all_reduce_hierarchical`.

        Collective over the world.
        """
        all_reduce_hierarchical(buffer, local=self.local, cross=self.cross, num_slices=self.num_slices)

    def close(self) -> None:
        """Frees the communicators `local` and `cross`; see `Collective.close`."""
        self.local.close()
        if self.cross is not None:
            self.cross.close()

    def elements_between_nodes(self, num_elems: int) -> int:
        """Returns how many elements this rank sends to other nodes in an all-reduce of `num_elems` elements.

        The ranks of `cross` are assumed to sum in a ring. Not collective.
        """
        if self.cross is None or self.cross.num_ranks == 1:
            return 0
        # A rank alone on its node sends the whole buffer.
        num_parts = 1 if self.local.num_ranks == 1 else self.num_slices
        counts = split_evenly(num_elems, num_parts=num_parts)
        return 2 * counts[self.local.rank] * (self.cross.num_ranks - 1) // self.cross.num_ranks


def make_two_level(world: World, topology: Topology) -> TwoLevel:
    """Creates the communicators for two-level reduction over `topology`. Collective over `world`.

    Raises TopologyError on every rank if topology and world have different numbers of ranks.
    """
    if topology.num_ranks != world.num_ranks:
        raise TopologyError(
            f"the topology places {topology.num_ranks} ranks ({topology.describe()}), but the world has "
            f"{world.num_ranks}: make the topology from the node names of all ranks",
            agreed=True,
        )
    node_groups = topology.groups("node")
    local = world.split(topology.groups("local"))
    cross = world.split(node_groups)
    if local is None:
        raise CommunicationError(f"rank {world.rank} is not on any node of {topology.describe()}")
    return TwoLevel(local=local, cross=cross, num_slices=len(node_groups))


def all_reduce_hierarchical(
    buffer: torch.Tensor, *, local: Collective, cross: Collective | None, num_slices: int
) -> None:
    """Sums `buffer` over all ranks, in place, by two-level reduction. Collective over `local` and `cross`.

    buffer: tensor of shape (n,) with any dtype that the backend sums; n and dtype are the same on every rank, and n
    may be 0, or less than `num_slices`.

    float16 is rounded twice, within the node and between nodes, while a flat sum rounds it once. With C nodes, 2
    (C-1)/C * n * itemsize bytes leave each node; `num_slices` ranks of the node send them at the same time. Nodes may
    have different numbers of ranks: a rank without a counterpart on every node takes part only within its node. Raises
    BufferMismatch if n or dtype differ and the backend detects it.
    """
    if cross is not None and cross.num_ranks == 1:
        local.all_reduce(buffer)  # one node
        return
    if local.num_ranks == 1:
        if cross is None:
            raise CommunicationError(
                f"rank {local.members[0]} is alone on its node and has no cross-node group"
            )
        cross.all_reduce(buffer)  # one rank on this node: its slice is the whole buffer
        return
    # Slices only for the first ranks of the node, which have a counterpart on every node.
    counts = split_evenly(buffer.numel(), num_parts=num_slices)
    counts += [0] * (local.num_ranks - num_slices)
    part = local.reduce_scatter(buffer, counts=counts)
    if cross is not None:
        cross.all_reduce(part)
    buffer.copy_(local.all_gather(part, counts=counts))


@final
class Traffic:
    """Counts the payload bytes, in the wire format, that this rank sends to other nodes. Thread-safe.

    Messages and the slices of an all-to-all count if their receiver is on another node. Other operations are counted as
    if the group were a ring, in which each rank sends only to the next rank: no algorithm sends less from each rank.
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
        """Returns a communicator that counts what `comm` sends; use it in place of `comm`. Not collective."""
        return _CountedGroup(comm, traffic=self, elsewhere=self._elsewhere(comm))

    def counted_levels(self, levels: TwoLevel) -> TwoLevel:
        """Returns the two communicators of `levels`, each replaced by one that counts what it sends. Not collective."""
        cross = self.counted(levels.cross) if levels.cross is not None else None
        return replace(levels, local=self.counted(levels.local), cross=cross)

    def counted_messages(self, messages: PeerMessages, *, comm: Collective) -> PeerMessages:
        """Returns an object, to use in place of `messages`, that counts what is sent between the ranks of `comm`.

        Not collective.
        """
        return _CountedMessages(messages, traffic=self, elsewhere=self._elsewhere(comm))

    def _elsewhere(self, comm: Collective) -> list[bool]:
        """Returns one value per rank of `comm`: True if that rank is on another node than this rank."""
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
