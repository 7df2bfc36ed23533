"""Reduce-scatter of gradients and all-gather of parameters, in two levels, unit by unit.

A unit consists of the elements that one reduction sums: a whole bucket, or an equal part of each rank's share of a
bucket.

Within a node the ranks read each other's gradients in shared memory. Between nodes, the sum of a node is sent to the
owner of each part, which adds up the sums of the nodes in node order. These are the same additions as those of
`AllReduceReducer` with `direct`, so the sums have the same bits. With C nodes, each node sends (C-1)/C of a unit's
encoded bytes, and (C-1)/C of the bytes of the unit's updated parameters. With one rank per node, C is the number of
ranks.

Source of the two levels: Jia et al. 2018, arXiv:1807.11205; of sharding the updates: Rajbhandari et al. 2020,
arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch

from hpctrain.comm import Collective, Pending, Transport
from hpctrain.reduce.codecs import Codec, CodecFeedback
from hpctrain.reduce.contract.bucket_reducer import check_same_plan, until
from hpctrain.reduce.shared_memory.inter_node import InterNodeResiduals, Loan, LossyPart, add_slices_in_order
from hpctrain.reduce.shared_memory.summation import add
from hpctrain.reduce.shared_memory.transport_reducer import TransportReducer
from hpctrain.reduce.zero.bucket_division import BucketDivision, ReductionUnit
from hpctrain.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The functions that gather the parameters of one unit (elements that are reduced together), as bytes.

    num_bytes: size of each rank's part of the parameters, in bytes.
    read: read(out) copies this rank's part of the parameters into `out`, uint8.
    write: write(owner, data) copies `data`, the part of the rank `owner`, into the parameters.
    """

    num_bytes: Sequence[int]
    read: Callable[[torch.Tensor], None]
    write: Callable[[int, torch.Tensor], None]


@dataclass(slots=True, kw_only=True)
class _Planned:
    """One unit of the plan, with its memory.

    slot: index of the memory slot that the unit uses; several units may use the same slot, one after another.
    segments: the unit's memory on each of the node's ranks.
    out: tensor that receives this rank's part of the sum.
    gathered: functions that gather the unit's parameters.
    feedback: encoding errors of the parts, by the rank that owns the part; empty without error feedback.
    """

    unit: ReductionUnit
    slot: int
    segments: list[torch.Tensor]
    out: torch.Tensor
    gathered: Gathered
    feedback: dict[int, CodecFeedback]


@final
class ZeroReducer(TransportReducer):
    """Sums units (gradient elements that are reduced together) over all ranks: each rank gets the sum of its part.

    Also gathers the parameters that the owners of the parts have updated.

    Parameters are never encoded. See `TransportReducer` for the arguments.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        comm: Collective,
        levels: Topology,
        algorithm: str,
        codec: Codec,
        feedback: bool = False,
    ) -> None:
        super().__init__(
            transport, comm=comm, levels=levels, algorithm=algorithm, codec=codec, feedback=feedback
        )
        place = self._place
        by_node = levels.groups("local")
        # On each other node one rank sends this rank's part of the gradients and takes its part of the parameters.
        self._partner = {
            node: ranks[place.local % len(ranks)] for node, ranks in enumerate(by_node) if node != place.node
        }
        # The owners on other nodes for which this rank is that partner.
        self._owners = [
            owner
            for node, ranks in enumerate(by_node)
            for local, owner in enumerate(ranks)
            if node != place.node and local % len(place.locals) == place.local
        ]
        # Each rank's part of the parameters arrives in the memory of this local rank.
        self._holder = {
            owner: (local if node == place.node else local % len(place.locals))
            for node, ranks in enumerate(by_node)
            for local, owner in enumerate(ranks)
        }
        self._everyone = range(len(place.locals))
        self._units: list[_Planned] = []
        self._busy: list[bool] = []

    def plan(
        self,
        plan: BucketDivision,
        *,
        num_slots: int,
        outs: Sequence[torch.Tensor],
        gathered: Sequence[Gathered],
    ) -> None:
        """Allocates memory for `num_slots` units, which are reduced at the same time. Collective.

        outs: for each bucket, the tensor that receives this rank's share of the sum: shape (share,), the bucket's
        dtype, in host memory.
        gathered: for each unit, the functions that gather its parameters.

        Raises BufferMismatch on every rank unless all ranks have the same plan; the message names the ranks that
        differ.
        """
        units, rank = plan.units, self._transport.rank
        num_slots = min(num_slots, len(units))
        how = f"{self._algorithm}, {self._codec.name}, {len(units)} sharded units in {num_slots}"
        check_same_plan(self._comm, plan.buckets, how=how)
        unit_bytes = [unit.numel * unit.dtype.itemsize for unit in units]
        sizes = [max(unit_bytes[slot::num_slots]) for slot in range(num_slots)]
        if self._memory.lay_out(sizes):
            self._comm.barrier()
        self._busy = [False] * num_slots
        self._units = []
        for number, unit in enumerate(units):
            own, share = unit.parts[rank], plan.shares[unit.bucket][rank]
            segments = [s[: unit_bytes[number]] for s in self._memory.segments(number % num_slots)]
            self._units.append(
                _Planned(
                    unit=unit,
                    slot=number % num_slots,
                    segments=segments,
                    out=outs[unit.bucket][own.begin - share.begin : own.end - share.begin],
                    gathered=gathered[number],
                    feedback=self._feedback(unit) if self._keeps_residuals else {},
                )
            )
        if self._keeps_residuals:
            parts = [
                LossyPart(plan.buckets[planned.unit.bucket], planned.unit.parts[owner], feedback)
                for planned in self._units
                for owner, feedback in planned.feedback.items()
            ]
            self._residuals = InterNodeResiduals(
                plan.buckets, parts, place=self._place, codec_name=self._codec.name
            )

    def _feedback(self, unit: ReductionUnit) -> dict[int, CodecFeedback]:
        """Returns the encoding errors for the parts that this rank sends to their owners, and for its own part.

        This rank does not encode its own part: it only adds the errors of a loaded checkpoint to it.
        """
        found = {}
        for owner in (*self._owners, self._transport.rank):
            numel = unit.parts[owner].numel
            own = slice(0, numel if owner == self._transport.rank else 0)
            found[owner] = CodecFeedback(
                self._codec, numel=numel, own=own, num_gradients=numel, dtype=unit.dtype
            )
        return found

    def claim(self, number: int) -> torch.Tensor | None:
        """Returns the memory of unit `number`: shape (unit.numel,), the unit's dtype, in host memory.

        The caller fills it, and must then reduce the unit. Returns None while another unit uses the memory. Not
        collective.
        """
        planned = self._units[number]
        if self._busy[planned.slot]:
            return None
        self._busy[planned.slot] = True
        return planned.segments[self._place.local].view(planned.unit.dtype)

    def reduce_scatter(self, number: int) -> Iterator[bool]:
        """Sums unit `number`, and writes this rank's part of the sum into `outs`. Collective.

        Call it after the unit's memory was claimed and filled. A generator like that of `BucketReducer.reduce`. Every
        rank starts the same operations in the same order.
        """
        return self._watched(
            self._reduce(number), f"unit {number}, {self._units[number].unit.numel} gradients"
        )

    def all_gather(self, number: int) -> Iterator[bool]:
        """Gathers the parameters of unit `number` from their owners. Collective.

        A generator like that of `reduce_scatter`.
        """
        return self._watched(
            self._gather(number), f"unit {number}, {self._units[number].unit.numel} parameters"
        )

    def _reduce(self, number: int) -> Iterator[bool]:
        planned, memory, mine = self._units[number], self._memory, self._transport.rank
        tag = self._take_tags(1)
        filled, taken = memory.begin_round(planned.slot)
        memory.raise_flag(filled)
        loan = self._scratch.loan()
        out, offsets = planned.out, planned.unit.offsets
        arriving: dict[int, torch.Tensor] = {}
        pending: list[Pending] = []
        if out.numel():
            num_bytes = self._codec.num_bytes(out.numel(), dtype=out.dtype)
            for node, partner in self._partner.items():
                arriving[node] = loan.bytes(num_bytes)
                pending.append(self._transport.receive(arriving[node], source=partner, tag=tag))
        yield from until(lambda: memory.raised(filled, by=self._everyone))
        buckets = [segment.view(out.dtype) for segment in planned.segments]
        for owner in self._from_next(self._owners):
            parts = [bucket[offsets[owner] : offsets[owner + 1]] for bucket in buckets]
            if parts[0].numel():
                data = self._encoded(parts, feedback=planned.feedback.get(owner), loan=loan)
                pending.append(self._send(data, to=owner, tag=tag))
                yield True
        if out.numel():
            parts = [bucket[offsets[mine] : offsets[mine + 1]] for bucket in buckets]
            add([part.numpy() for part in parts], into=[out.numpy()])
        memory.raise_flag(taken)
        yield from self._until_done(pending)
        if arriving:
            add_slices_in_order(out, arriving, mine=self._place.node, codec=self._codec)
        if planned.feedback:
            planned.feedback[mine].add_to(out, first=0)
        yield from until(lambda: memory.raised(taken, by=self._everyone))
        loan.end()
        self._busy[planned.slot] = False

    def _encoded(
        self, parts: Sequence[torch.Tensor], *, feedback: CodecFeedback | None, loan: Loan
    ) -> torch.Tensor:
        """Returns the encoded sum of one part over the ranks of the node."""
        values = parts[0]
        if len(parts) > 1:
            values = loan.values(values.numel(), dtype=values.dtype)
            add([part.numpy() for part in parts], into=[values.numpy()])
        if self._codec.exact:
            return values.view(torch.uint8)
        data = loan.bytes(self._codec.num_bytes(values.numel(), dtype=values.dtype))
        if feedback is None:
            self._codec.encode(values, out=data)
        else:
            feedback.encode(values, first=0, out=data)
        return data

    def _gather(self, number: int) -> Iterator[bool]:
        planned, memory, mine = self._units[number], self._memory, self._transport.rank
        tag = self._take_tags(1)
        yield from until(lambda: not self._busy[planned.slot])
        self._busy[planned.slot] = True
        filled, taken = memory.begin_round(planned.slot)
        num_bytes = planned.gathered.num_bytes
        offsets = list(accumulate(num_bytes, initial=0))
        places = [slice(offsets[owner], offsets[owner + 1]) for owner in range(len(num_bytes))]
        segment = planned.segments[self._place.local]
        pending = [
            self._transport.receive(segment[places[owner]], source=owner, tag=tag)
            for owner in self._owners
            if num_bytes[owner]
        ]
        if num_bytes[mine]:
            planned.gathered.read(segment[places[mine]])
            for partner in self._from_next(list(self._partner.values())):
                pending.append(self._send(segment[places[mine]], to=partner, tag=tag))
        yield from self._until_done(pending)
        memory.raise_flag(filled)
        yield from until(lambda: memory.raised(filled, by=self._everyone))
        for owner, holder in self._holder.items():
            if owner != mine and num_bytes[owner]:
                planned.gathered.write(owner, planned.segments[holder][places[owner]])
        memory.raise_flag(taken)
        yield from until(lambda: memory.raised(taken, by=self._everyone))
        self._busy[planned.slot] = False

    def _from_next(self, ranks: Sequence[int]) -> list[int]:
        """Returns `ranks` in ascending order, starting after this rank, so that not all ranks send to rank 0 first."""
        return sorted(ranks, key=lambda rank: (rank - self._transport.rank) % self._comm.num_ranks)

    def _until_done(self, pending: Sequence[Pending]) -> Iterator[bool]:
        return until(lambda: self._transport.all_done(pending))

    def _forget_plan(self) -> None:
        self._units = []
