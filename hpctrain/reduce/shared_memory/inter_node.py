"""The sum between nodes of one carrier's part, as generators over a transport. Two algorithms, which send equal bytes.

direct: every carrier sends each owner its slice, encoded once; the owner sums in float32 in node order, encodes
the sum once and sends it to all. Two roundings, whatever the number of nodes; two phases. Thakur et al. 2005,
section 4.5, with the pairwise schedule: in round k rank i sends to i + k and receives from i - k, so that each
node's link is used once per round.

ring: each slice passes all carriers, each of which adds its own (Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002). Messages between neighbours only, but C - 1 roundings and 2 (C - 1) phases.

Both send 2 (C - 1) / C of the part's encoded bytes from every node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hpctrain.comm import Pending, Transport
from hpctrain.reduce.codecs.codec import Codec


class Feedback(Protocol):
    """Encodes one part, with or without error feedback. See `part_feedback.py`."""

    def encode(self, values: torch.Tensor, *, first: int, out: torch.Tensor) -> None:
        """Encodes `values` for their owner into `out`. first: their offset in the part. May change `values`."""

    def encode_sum(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        """Encodes the sum that this rank owns into `out`. May change `values`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One carrier's part of one chunk.

    values: shape (n,): on entry this node's sum, at the end the sum over nodes in the own slice.
    offsets: offset of each owner's slice, and the end of the last one. peers: world rank of each owner. mine: index of
    this rank among them.
    """

    values: torch.Tensor
    offsets: Sequence[int]
    peers: Sequence[int]
    mine: int

    def slice(self, owner: int) -> torch.Tensor:
        return self.values[self.offsets[owner] : self.offsets[owner + 1]]

    @property
    def num_peers(self) -> int:
        return len(self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How a part is sent. tag: first of two tags used by this part only. scratch(n): returns n bytes of memory.

    send: as `Transport.send`, but counts the bytes.
    """

    transport: Transport
    codec: Codec
    feedback: Feedback
    tag: int
    scratch: Callable[[int], torch.Tensor]
    send: Callable[..., Pending]

    def until(self, pending: Sequence[Pending]) -> Iterator[bool]:
        """Waits for messages; see `polling.until` for what it yields."""
        progressed = True
        while not self.transport.all_done(pending):
            yield progressed
            progressed = False


Deliver = Callable[[int, torch.Tensor], None]


def direct(part: Part, wire: Wire, *, deliver: Deliver) -> Iterator[bool]:
    """Sums `part` over its peers; generator as `BucketReducer.reduce`. deliver(owner, data): called once per slice with
    its encoded sum."""
    size = wire.codec.num_bytes
    count, mine, dtype = part.num_peers, part.mine, part.values.dtype
    own = part.slice(mine)
    own_bytes = size(own.numel(), dtype=dtype)
    arriving = {}
    pending = []
    for shift in range(1, count):
        source = (mine - shift) % count
        arriving[source] = wire.scratch(own_bytes)
        if own_bytes:
            pending.append(wire.transport.receive(arriving[source], source=part.peers[source], tag=wire.tag))
    for shift in range(1, count):
        owner = (mine + shift) % count
        values = part.slice(owner)
        if values.numel():
            data = wire.scratch(size(values.numel(), dtype=dtype))
            wire.feedback.encode(values, first=part.offsets[owner], out=data)
            pending.append(wire.send(data, to=part.peers[owner], tag=wire.tag))
    # The owners' sums may arrive while this rank still waits for slices of others.
    returning = {}
    back = []
    for shift in range(1, count):
        source = (mine - shift) % count
        num_bytes = size(part.slice(source).numel(), dtype=dtype)
        if num_bytes:
            returning[source] = wire.scratch(num_bytes)
            back.append(
                wire.transport.receive(returning[source], source=part.peers[source], tag=wire.tag + 1)
            )
    yield from wire.until(pending)
    if own_bytes:
        sum_in_order(own, arriving, mine=mine, codec=wire.codec)
        data = wire.scratch(own_bytes)
        wire.feedback.encode_sum(own, out=data)
        leaving = []
        for shift in range(1, count):
            leaving.append(wire.send(data, to=part.peers[(mine + shift) % count], tag=wire.tag + 1))
        deliver(mine, data)
        back += leaving
    yield from wire.until(back)
    for source, data in returning.items():
        deliver(source, data)


def sum_in_order(own: torch.Tensor, arriving: dict[int, torch.Tensor], *, mine: int, codec: Codec) -> None:
    """Adds the encoded slices of the other nodes to `own`, in the order of the nodes, so that the result does not
    depend on which node sums. own: this node's slice, shape (n,). arriving: node -> encoded slice, uint8. mine: this
    node."""
    before = [arriving[source] for source in sorted(arriving) if source < mine]
    after = [arriving[source] for source in sorted(arriving) if source > mine]
    if before:
        total = torch.empty_like(own)
        codec.decode(before[0], out=total)
        for data in before[1:]:
            codec.add(data, out=total)
        own.add_(total)  # float addition commutes: (earlier nodes) + own
    for data in after:
        codec.add(data, out=own)


def ring(part: Part, wire: Wire, *, deliver: Deliver) -> Iterator[bool]:
    """Same as `direct`, with messages between neighbours only."""
    size = wire.codec.num_bytes
    count, mine, dtype = part.num_peers, part.mine, part.values.dtype
    to, source = part.peers[(mine + 1) % count], part.peers[(mine - 1) % count]
    pending: list[Pending] = []
    for step in range(count - 1):
        leaving, coming = part.slice((mine - step - 1) % count), part.slice((mine - step - 2) % count)
        arrived = None
        if coming.numel():
            arrived = wire.scratch(size(coming.numel(), dtype=dtype))
            pending.append(wire.transport.receive(arrived, source=source, tag=wire.tag))
        if leaving.numel():
            data = wire.scratch(size(leaving.numel(), dtype=dtype))
            wire.feedback.encode(leaving, first=part.offsets[(mine - step - 1) % count], out=data)
            pending.append(wire.send(data, to=to, tag=wire.tag))
        yield from wire.until(pending)
        pending = []
        if arrived is not None:
            wire.codec.add(arrived, out=coming)
    # Sums are forwarded as their owner encoded them: every node decodes the same bytes.
    own = part.slice(mine)
    data = wire.scratch(size(own.numel(), dtype=dtype))
    if own.numel():
        wire.feedback.encode_sum(own, out=data)
    for step in range(count - 1):
        owner = (mine - step - 1) % count
        num_bytes = size(part.slice(owner).numel(), dtype=dtype)
        arrived = wire.scratch(num_bytes)
        pending = []
        if num_bytes:
            pending.append(wire.transport.receive(arrived, source=source, tag=wire.tag + 1))
        if data.numel():
            pending.append(wire.send(data, to=to, tag=wire.tag + 1))
        if own.numel() and step == 0:
            deliver(mine, data)
        yield from wire.until(pending)
        if num_bytes:
            deliver(owner, arrived)
        data = arrived
