"""Sums one part of a chunk between nodes. The two algorithms are generators, and send the same number of bytes.

Each node has one carrier of the part: the rank that exchanges the part with the other nodes. The part is cut into
slices; each carrier owns one slice, and computes the sum of this slice.

direct: every carrier encodes its values of each slice once, and sends them to the slice's owner. The owner adds up the
values in node order (float32 or float64), encodes the sum once, and sends the sum to all carriers. There are two
roundings and two phases, whatever the number of nodes. Source: Thakur et al. 2005, section 4.5, with the pairwise
schedule: in round k rank i sends to i + k and receives from i - k, so that each node's link is used once per round.

ring: each slice passes all carriers, and each carrier adds its own values (Patarasuk and Yuan 2009,
doi:10.1016/j.jpdc.2008.09.002). A carrier sends only to the next carrier, but with C nodes there are C - 1 roundings
and 2 (C - 1) phases.

With both algorithms, every node sends 2 (C - 1) / C of the part's encoded bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

import torch

from hpctrain.comm import Collective, Pending, Transport
from hpctrain.errors import CheckpointError
from hpctrain.reduce.codecs import LOST, NAME as RESIDUAL, Codec, CodecFeedback, rows_in, shapes_of
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import Shapes, StateTensor
from hpctrain.reduce.shared_memory.shared_buckets import ElemRange, TwoLevelPlace, gradient_pieces
from hpctrain.storage import part_of


class Feedback(Protocol):
    """Encodes the values of one part of a chunk, with or without error feedback. See `hpctrain.reduce.codecs`."""

    def encode(self, values: torch.Tensor, *, first: int, out: torch.Tensor) -> None:
        """Encodes `values`, which belong to the slice of another node's rank, into `out`. May change `values`.

        first: offset of the values in the part.
        """

    def encode_sum(self, values: torch.Tensor, *, out: torch.Tensor) -> None:
        """Encodes `values`, the sum of the slice that this rank owns, into `out`. May change `values`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of one chunk of a bucket that one carrier (the rank that exchanges the part with other nodes) sums.

    values: shape (n,). At the start, the values are this node's sum; at the end, this rank's slice holds the sum over
    the nodes.
    offsets: offset of each carrier's slice, and the end of the last slice.
    peers: world ranks of the carriers, in node order.
    mine: index of this rank in `peers`.
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
    """How a part is sent.

    tag: first of two message tags that only this part uses.
    transport: transport of the messages.
    codec, feedback: encode the values, without and with error feedback.
    scratch: function of n that returns n bytes of memory.
    send: function like `Transport.send` that also counts the bytes.
    """

    transport: Transport
    codec: Codec
    feedback: Feedback
    tag: int
    scratch: Callable[[int], torch.Tensor]
    send: Callable[..., Pending]

    def until(self, pending: Sequence[Pending]) -> Iterator[bool]:
        """Waits for messages. After each poll that finds them unfinished, yields whether there was progress.

        pending: handles of the messages.

        The first value is True, because the caller has made progress before the wait; all later values are False.
        """
        progressed = True
        while not self.transport.all_done(pending):
            yield progressed
            progressed = False


Deliver = Callable[[int, torch.Tensor], None]


def direct(part: Part, wire: Wire, *, deliver: Deliver) -> Iterator[bool]:
    """Sums a part of a chunk over all nodes by the algorithm `direct`. A generator like `BucketReducer.reduce`.

    Every carrier (the rank of its node that exchanges the part) sends each slice of the part to the carrier that owns
    the slice, and receives the sums of all slices.

    part: the part, with the carriers of all nodes.
    wire: how the part is sent.
    deliver: function that is called once per slice, with the index of the slice's owner and the encoded sum.
    """
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
        add_slices_in_order(own, arriving, mine=mine, codec=wire.codec)
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


def add_slices_in_order(
    own: torch.Tensor, arriving: dict[int, torch.Tensor], *, mine: int, codec: Codec
) -> None:
    """Adds the encoded slices of the other nodes to `own`, in node order.

    The order makes the result independent of which node computes the sum.

    own: this node's values of the slice, shape (n,).
    arriving: the encoded values of each other node, uint8, by the index of the node.
    mine: index of this node.
    """
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
    """Sums a part of a chunk over all nodes by the algorithm `ring`. A generator like `BucketReducer.reduce`.

    Each carrier (the rank of its node that exchanges the part) sends only to the next carrier.

    part: the part, with the carriers of all nodes.
    wire: how the part is sent.
    deliver: function that is called once per slice, with the index of the slice's owner and the encoded sum.
    """
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


_ALIGNMENT = 64


@final
class ChunkMemory:
    """Pool of uint8 message buffers. A chunk takes buffers through a `Loan`, which returns all of them at the end.

    Memory is reused, since the first access to a page of new memory takes longer than a copy.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._made: list[
            torch.Tensor
        ] = []  # keeps all buffers alive, since messages may still arrive in them

    def loan(self) -> Loan:
        return Loan(self)

    def take(self, capacity: int) -> torch.Tensor:
        free = self._free.get(capacity)
        if free:
            return free.pop()
        self._made.append(torch.empty(capacity, dtype=torch.uint8))
        return self._made[-1]

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)


@final
class Loan:
    """Buffers that one chunk has taken from the pool. `end` returns the buffers to the pool."""

    def __init__(self, memory: ChunkMemory) -> None:
        self._memory = memory
        self._taken: list[torch.Tensor] = []

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """Returns a tensor of shape (num_bytes,), uint8, aligned to 64 bytes, not zeroed."""
        # Few distinct sizes, so that chunks of similar length reuse the same memory.
        capacity = _ALIGNMENT << max(0, (max(1, num_bytes) - 1) // _ALIGNMENT).bit_length()
        buffer = self._memory.take(capacity)
        self._taken.append(buffer)
        return buffer[:num_bytes]

    def values(self, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of shape (numel,), `dtype`, not zeroed."""
        return self.bytes(numel * dtype.itemsize).view(dtype)

    def end(self) -> None:
        for buffer in self._taken:
            self._memory.give_back(buffer)
        self._taken.clear()


@dataclass(frozen=True, slots=True)
class LossyPart:
    """A part of a bucket that this rank encodes, and the encoding errors of this part.

    bucket: the bucket.
    part: the range of the bucket's elements.
    feedback: the encoding errors.
    """

    bucket: Bucket
    part: ElemRange
    feedback: CodecFeedback


@final
class InterNodeResiduals:
    """This rank's errors (residuals) of encoding values for other nodes, in gradient space.

    Gradient space is the concatenation of all flattened trainable parameters in the optimizer's order.

    buckets: all buckets of the plan.
    parts: the parts that this rank encodes.
    place: position of this rank in two-level sums.
    codec_name: name of the codec, for error messages.
    """

    def __init__(
        self, buckets: Sequence[Bucket], parts: Sequence[LossyPart], *, place: TwoLevelPlace, codec_name: str
    ) -> None:
        self._parts = parts
        self._place = place
        self._codec_name = codec_name
        self.num_elems = sum(slot.numel for bucket in buckets for slot in bucket.slots)
        wide = any(bucket.dtype is torch.float64 for bucket in buckets)
        self._dtype = torch.float64 if wide else torch.float32

    def end_step(self, *, applied: bool, rescale: float) -> None:
        for part in self._parts:
            part.feedback.end_step(applied=applied, rescale=rescale)

    def state(self) -> list[StateTensor]:
        """Returns this rank's errors as blocks of a tensor of shape (nodes + 1, num_elems), float32 or float64.

        Row c holds the errors of the values that node c sent; the last row holds the errors of the sums.
        """
        shape = (self._place.num_nodes + 1, self.num_elems)
        found = []
        for position, lost, owned in self._pieces():
            here = StateTensor(
                name=LOST,
                tensor=lost.to(self._dtype)[None],
                global_shape=shape,
                offset=(self._place.node, position),
            )
            if owned:
                found.append(replace(here, offset=(self._place.num_nodes, position)))
                here = replace(here, tensor=torch.zeros_like(here.tensor))
            found.append(here)
        return found

    def rows_to_load(self, shapes: Shapes, *, rank: int, num_ranks: int) -> dict[str, list[range]]:
        """Returns the rows of the saved errors that this rank must read from a checkpoint, by name of the tensor.

        shapes: shapes of the saved tensors, by name.

        If the saved run had the same number of nodes, the result is the row of this rank's node and the row of the
        sums. Otherwise the result is an equal share of all rows.
        """
        name = _saved_name(shapes)
        if name is None or len(shapes[name]) != 2:
            return {}
        if self._fits(name, shapes):
            node, last = self._place.node, self._place.num_nodes
            return {name: [range(node, node + 1), range(last, last + 1)]}
        return {name: [range(*part_of(shapes[name][0], part=rank, num_parts=num_ranks))]}

    def load_state(
        self, tensors: Mapping[str, torch.Tensor], shapes: Shapes | None, *, comm: Collective
    ) -> None:
        """Restores the errors from a checkpoint, if the checkpoint contains errors. Collective over `comm`.

        If the saved run had the same number of nodes, each node restores its own errors. Otherwise the saved errors are
        added up, and each sum is given to the rank that owns the elements. Raises CheckpointError on every rank if the
        checkpoint is from another model.
        """
        shapes = shapes_of(tensors) if shapes is None else shapes
        name = _saved_name(shapes)
        if name is None:
            return
        if len(shapes[name]) != 2 or shapes[name][1] != self.num_elems:
            raise CheckpointError(
                f"the checkpoint's residuals of {self._codec_name} have shape {tuple(shapes[name])}, this model needs "
                f"(rows, {self.num_elems}): resume with the same model and frozen parameters as the saved run"
            )
        wanted = self.rows_to_load(shapes, rank=comm.rank, num_ranks=comm.num_ranks)
        rows = rows_in(tensors[name], rows=wanted[name])
        if not self._fits(name, shapes):
            total = rows.sum(dim=0, dtype=torch.float64)
            comm.all_reduce(total)
            self.take_over(total)
            return
        of_node, of_sums = rows
        for position, lost, owned in self._pieces():
            part = slice(position, position + lost.numel())
            lost.copy_(of_node[part] + of_sums[part] if owned else of_node[part])

    def _fits(self, name: str, shapes: Shapes) -> bool:
        """Returns True if the saved run had the same number of nodes as this run."""
        return name == LOST and shapes[name][0] == self._place.num_nodes + 1

    def total(self, comm: Collective) -> torch.Tensor:
        """Returns the sum of all ranks' errors, shape (num_elems,), float64. Collective."""
        total = torch.zeros(self.num_elems, dtype=torch.float64)
        for position, lost, _ in self._pieces():
            total[position : position + lost.numel()] += lost
        comm.all_reduce(total)
        return total

    def take_over(self, total: torch.Tensor) -> None:
        """Sets the errors of the elements that this rank owns to the values in `total`, and its other errors to 0.

        total: sum of the errors of all ranks, shape (num_elems,).
        """
        for position, lost, owned in self._pieces():
            lost.copy_(total[position : position + lost.numel()]) if owned else lost.zero_()

    def _pieces(self) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """Yields (position, errors, owned) for each contiguous run of this rank's errors.

        `position` is the offset of the run in the concatenation of all flattened parameters, `errors` is a view, and
        `owned` is True if this rank owns the elements of the run.
        """
        for lossy in self._parts:
            part, feedback = lossy.part, lossy.feedback
            own = ElemRange(part.begin + feedback.own.start, part.begin + feedback.own.stop)
            for span in (ElemRange(part.begin, own.begin), own, ElemRange(own.end, part.end)):
                for piece in gradient_pieces(lossy.bucket, span):
                    first = span.begin - part.begin + piece.first
                    yield piece.position, feedback.lost[first : first + piece.numel], span is own


def _saved_name(shapes: Shapes) -> str | None:
    return next((name for name in (LOST, RESIDUAL) if name in shapes), None)
