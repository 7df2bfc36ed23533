"""Two-level sums in shared memory and messages, chunk by chunk, with several chunks in flight.

Buckets are in memory that the ranks of a node share. With one node, buckets are summed in this memory. With several
nodes, each chunk of a bucket is divided into one part per carrier; a carrier is a rank that has a counterpart with the
same local rank on every other node. The carrier sums its part over the buckets of its node's ranks, exchanges the sum
with its counterparts (`inter_node.py`), and decodes the result directly into every bucket of its node. Each element
leaves a node once, and the carriers share that work; within the node nothing is copied. With one rank per node this is
a flat sum.

Source of the two levels: Jia et al. 2018, arXiv:1807.11205.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import final

import torch

from hpctrain.comm import NUM_TAGS, Collective, Transport, is_true_everywhere, sum_one_by_one
from hpctrain.reduce.codecs import Codec, CodecFeedback, NoFeedback
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import (
    Finishing,
    Numbers,
    Reduced,
    check_same_plan,
    one_round,
    until,
)
from hpctrain.reduce.contract.step_end import GradientSquares, all_reduced
from hpctrain.reduce.shared_memory.inter_node import (
    InterNodeResiduals,
    LossyPart,
    Part,
    Wire,
    direct,
    ring,
)
from hpctrain.reduce.shared_memory.shared_buckets import (
    MAX_NUMBERS,
    ElemRange,
    Flag,
    NodeMemory,
    chunks_of,
    cut,
)
from hpctrain.reduce.shared_memory.summation import COMPILED, Compiled, add
from hpctrain.reduce.shared_memory.transport_reducer import TransportReducer
from hpctrain.topology import Topology

# Elements of a piece. The others wait at most for one piece of a rank, about 25 us.
PIECE_ELEMS = 1 << 15
_COUNTER_BYTES = 64  # a cache line


class SumStatus(Enum):
    """Result of one call that advances a sum: the sum waits for other ranks, has made progress, or is complete."""

    WAITS = 0
    PROGRESSED = 1
    ENDED = 2


# Indexed by the result of the compiled `take`.
_PROGRESS = (SumStatus.WAITS, SumStatus.PROGRESSED, SumStatus.ENDED)


def num_pieces_of(numel: int) -> int:
    return -(-numel // PIECE_ELEMS)


def tally_bytes(numel: int) -> int:
    """Returns the size of a bucket's tally, in bytes.

    The tally is shared memory that holds the number of claimed pieces, and the sum of squares of each piece.
    """
    return _COUNTER_BYTES + 8 * num_pieces_of(numel)


@final
class NodeSum:
    """Sums one bucket over the ranks of a node in shared memory, piece by piece. Idle ranks do the work.

    A rank that has finished backward sums the pieces that all ranks have filled so far, so that little remains to be
    summed when the last rank has finished. The result does not depend on which rank sums a piece, because each piece is
    summed in rank order. Ranks claim pieces through an atomic counter, which needs compiled code; with numpy each rank
    sums a fixed share of the pieces.

    The bucket is reduced once per step. All counts of pieces accumulate over the steps and are never reset.

    buckets: the bucket of each local rank, shape (numel,), in host memory.
    memory: the node's shared memory, which has the flags of the bucket.
    number: index of the bucket in `memory`.
    tally: zeroed memory shared by the node's ranks, uint8, shape (tally_bytes(numel),).
    local: local rank of this rank.
    num_gradients: number of elements that count in the norm. These elements come first in the bucket.
    compiled: compiled functions; None unless all of the node's ranks have compiled functions.
    """

    def __init__(
        self,
        buckets: Sequence[torch.Tensor],
        *,
        memory: NodeMemory,
        number: int,
        tally: torch.Tensor,
        local: int,
        num_gradients: int,
        compiled: Compiled | None,
    ) -> None:
        self._parts = tuple(bucket.numpy() for bucket in buckets)
        self._memory = memory
        self._flags = memory.counts_of(number)
        self._is_filled, self._is_summed = memory.flags_of(number)
        self._begun = tally[:8].view(torch.int64).numpy()
        self._squares = tally[_COUNTER_BYTES:].view(torch.float64).numpy()
        self.factor = 1.0  # for the following sums; the same on all of the node's ranks
        self._local = local
        self._num_gradients = num_gradients
        self._num_pieces = len(self._squares)
        self._own = cut(ElemRange(0, self._num_pieces), num_parts=len(buckets))[local]
        self._next = self._own.begin
        self._before = 0  # pieces of completed rounds
        self._filled = 0
        self._summed = 0
        self._compiled = compiled

    def fill(self, num_elems: int) -> None:
        """Announces that this rank has written the first `num_elems` elements of its bucket.

        Any rank may then overwrite these elements.
        """
        whole = num_elems >= len(self._parts[0])
        filled = self._before + (self._num_pieces if whole else num_elems // PIECE_ELEMS)
        if filled > self._filled:
            self._filled = filled
            if self._compiled is not None:
                self._compiled.fill(self._flags[self._local], filled)
            else:
                self._memory.raise_flag(Flag(self._is_filled.place, filled))

    def sum(self) -> SumStatus:
        """Sums the pieces that are available. Call it after `fill` was called for the whole bucket.

        Returns ENDED when the bucket holds the sum; the next call then begins the next sum.
        """
        progress = self._sum_own() if self._compiled is None else self._sum_any(self._compiled.take)
        if progress is SumStatus.ENDED:
            self._before += self._num_pieces
            self._next = self._own.begin
        return progress

    def _sum_any(self, take: Callable[..., int]) -> SumStatus:
        """Claims and sums all pieces of the bucket that all ranks have filled and no rank has claimed.

        take: compiled function that claims and sums pieces.
        """
        return _PROGRESS[
            take(
                self._parts, self._flags, self._begun, self._squares,
                self._local, self._before, PIECE_ELEMS, self._num_gradients, self.factor,
            )
        ]  # fmt: skip

    def _sum_own(self) -> SumStatus:
        """Sums the next piece of this rank's share of the bucket, if all ranks have filled this piece."""
        memory, everyone = self._memory, range(len(self._parts))
        if self._next < self._own.end:
            if not memory.raised(Flag(self._is_filled.place, self._before + self._next + 1), by=everyone):
                return SumStatus.WAITS
            begin = self._next * PIECE_ELEMS
            parts = [part[begin : begin + PIECE_ELEMS] for part in self._parts]
            into = parts if len(parts) > 1 or self.factor != 1 else ()
            self._squares[self._next] = add(
                parts, into=into, num_squared=self._num_gradients - begin, factor=self.factor
            )
            self._next += 1
            return SumStatus.PROGRESSED
        summed = Flag(self._is_summed.place, self._before + self._num_pieces)
        if summed.value > self._summed:
            self._summed = summed.value
            memory.raise_flag(summed)
        return SumStatus.ENDED if memory.raised(summed, by=everyone) else SumStatus.WAITS

    def square(self) -> float:
        """Returns the sum of squares of the bucket's summed gradients, the same on all of the node's ranks."""
        return sum_one_by_one(self._squares.tolist())


def sum_into(values: torch.Tensor, buckets: Sequence[torch.Tensor]) -> None:
    """Adds up at least two `buckets` in order, each of shape (n,), and writes the sum to `values`, shape (n,)."""
    add([bucket.numpy() for bucket in buckets], into=[values.numpy()])


# Two-level sums in shared memory and messages, chunk by chunk, several chunks in flight.


EXCHANGES = {"direct": direct, "ring": ring}


@dataclass(slots=True, kw_only=True)
class _Planned:
    """One bucket of the plan, with its memory.

    mine: this rank's bucket, in host memory that the node's ranks share.
    buckets: the bucket of each of the node's ranks.
    on_device: this rank's gradients on the device of the model; None if that is the CPU.
    """

    bucket: Bucket
    mine: torch.Tensor
    buckets: list[torch.Tensor]
    on_device: torch.Tensor | None
    parts: list[ElemRange]  # this carrier's part of each chunk
    within: NodeSum | None = None  # only if there is one node
    feedback: list[CodecFeedback] = field(default_factory=list)  # of each part; empty: no error feedback


@dataclass(slots=True, kw_only=True)
class _Carried:
    """Numbers that are summed along with the buckets.

    numbers: this rank's numbers, which the sums replace.
    written: flag that shows that a rank has published its numbers.
    to_end: number of buckets that are not yet reduced.
    """

    numbers: Numbers
    written: Flag
    to_end: int


@final
class AllReduceReducer(TransportReducer):
    """`BucketReducer` over a transport, by two-level sums. See `TransportReducer` for the other arguments.

    exchange: algorithm of the sums between nodes: `direct` or `ring`.
    chunk_elems: largest number of elements in a chunk.
    in_flight: largest number of chunks of one bucket in flight.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        comm: Collective,
        levels: Topology,
        algorithm: str,
        exchange: str,
        codec: Codec,
        feedback: bool = False,
        chunk_elems: int = 1 << 19,
        in_flight: int = 4,
    ) -> None:
        super().__init__(
            transport, comm=comm, levels=levels, algorithm=algorithm, codec=codec, feedback=feedback
        )
        self._exchange = EXCHANGES[exchange]
        self._no_feedback = NoFeedback(codec)
        self._chunk_elems = chunk_elems
        self._in_flight = in_flight
        self._squares = False
        self._num_begun = 0  # reductions of this step
        self._all_squares = GradientSquares([], [])
        self._carried: _Carried | None = None
        self._buckets: list[_Planned] = []

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        check_same_plan(self._comm, buckets, how=f"{self._algorithm}, {self._codec.name}")
        lost = self._residuals.total(self._comm) if self._residuals is not None else None
        within = self._place.num_nodes == 1
        sizes = [b.numel * b.dtype.itemsize for b in buckets]
        if self._memory.lay_out([*sizes, *(tally_bytes(b.numel) for b in buckets if within)]):
            self._comm.barrier()
        # The extension may be missing on some ranks of a node.
        all_compiled = within and is_true_everywhere(self._comm, COMPILED is not None)
        self._buckets = []
        self._carried = None
        for number, bucket in enumerate(buckets):
            shared = [memory.view(bucket.dtype) for memory in self._memory.segments(number)]
            mine = shared[self._place.local]
            on_device = None if device.type == "cpu" else torch.zeros_like(mine, device=device)
            planned = _Planned(
                bucket=bucket, mine=mine, buckets=shared, on_device=on_device, parts=self._parts(bucket)
            )
            if within:
                planned.within = NodeSum(
                    shared,
                    memory=self._memory,
                    number=number,
                    tally=self._memory.segments(len(buckets) + number)[0],
                    local=self._place.local,
                    num_gradients=bucket.num_gradients if self._squares and bucket.slots else 0,
                    compiled=COMPILED if all_compiled else None,
                )
            if self._keeps_residuals:
                planned.feedback = [self._feedback(part, bucket=bucket) for part in planned.parts]
            self._buckets.append(planned)
        if self._keeps_residuals:
            parts = [
                LossyPart(planned.bucket, part, feedback)
                for planned in self._buckets
                for part, feedback in zip(planned.parts, planned.feedback, strict=True)
            ]
            self._residuals = InterNodeResiduals(
                buckets, parts, place=self._place, codec_name=self._codec.name
            )
            # Errors are kept only if the parameters are the same (not in a calibration).
            if lost is not None and lost.numel() == self._residuals.num_elems:
                self._residuals.take_over(lost)
        memory = [b.mine if b.on_device is None else b.on_device for b in self._buckets]
        self._all_squares = GradientSquares(buckets, memory)
        return memory

    def _parts(self, bucket: Bucket) -> list[ElemRange]:
        """Returns the range of elements of each chunk of `bucket` that this rank exchanges with other nodes.

        The ranges are empty if this rank is not a carrier: a rank with a counterpart on every other node. Returns [] if
        there is only one node.
        """
        if self._place.num_nodes == 1:
            return []
        chunks = chunks_of(bucket.numel, chunk_elems=self._chunk_elems)
        if not self._place.column:
            return [ElemRange(chunk.begin, chunk.begin) for chunk in chunks]
        return [cut(chunk, num_parts=self._place.num_carriers)[self._place.local] for chunk in chunks]

    def _feedback(self, part: ElemRange, *, bucket: Bucket) -> CodecFeedback:
        own = cut(ElemRange(0, part.numel), num_parts=self._place.num_nodes)[self._place.node]
        first_flag = bucket.first_flag if bucket.slots else bucket.numel
        return CodecFeedback(
            self._codec,
            numel=part.numel,
            own=slice(own.begin, own.end),
            num_gradients=max(0, min(part.numel, first_flag - part.begin)),
            dtype=bucket.dtype,
        )

    def keep_squares(self) -> None:
        self._squares = True

    def begin_step(self, factor: float) -> float:
        self._num_begun = 0
        for bucket in self._buckets:
            if bucket.within is not None:
                bucket.within.factor = factor
        return factor if self._place.num_nodes == 1 else 1.0

    def finish(self, numbers: Numbers, *, comm: Collective) -> Finishing:
        """Ends the reductions of a step: computes the gradient norm and sums `numbers` over the ranks. Collective.

        See `BucketReducer.finish`. With one node, the reductions also compute the sums of squares, and sum `numbers` if
        no reduction of the step has begun yet.
        """
        if not self._squares or self._place.num_nodes > 1:
            return all_reduced(self._all_squares, numbers, comm=comm)
        carried = len(numbers) > 0 and self._num_begun == 0 and self._sums_numbers(numbers)
        if carried:
            written = self._memory.write_numbers(numbers)
            self._carried = _Carried(numbers=numbers, written=written, to_end=len(self._buckets))
        return self._finish_on_node(numbers, comm=comm, carried=carried)

    def _finish_on_node(self, numbers: Numbers, *, comm: Collective, carried: bool) -> Finishing:
        if not carried and len(numbers):
            if self._sums_numbers(numbers):
                yield from self._watched(self._sum_in_memory(numbers), f"{len(numbers)} numbers")
            else:
                comm.all_reduce(torch.from_numpy(numbers))
        return Reduced(
            sum_one_by_one(b.within.square() for b in self._buckets if b.within is not None), numbers
        )

    def filled(self, number: int, num_elems: int) -> None:
        bucket = self._buckets[number]
        if bucket.within is not None and bucket.on_device is None:
            bucket.within.fill(num_elems)

    def _sums_numbers(self, numbers: Numbers) -> bool:
        """Returns True if the node's memory has room to sum `numbers`, and there is only one node."""
        return self._place.num_nodes == 1 and len(numbers) <= MAX_NUMBERS

    def _sum_in_memory(self, numbers: Numbers) -> Iterator[bool]:
        written = self._memory.write_numbers(numbers)
        yield from self._all_written(written)
        self._memory.add_numbers(written, numbers)

    def reduce(self, number: int) -> Iterator[bool]:
        what = f"bucket {number} ({self._buckets[number].mine.numel()} x {self._buckets[number].mine.dtype})"
        return self._watched(self._reduce(number), what)

    def _reduce(self, number: int) -> Iterator[bool]:
        bucket = self._buckets[number]
        self._num_begun += 1
        if bucket.on_device is not None:
            bucket.mine.copy_(bucket.on_device)
        if bucket.within is not None:
            bucket.within.fill(bucket.bucket.numel)
            while (found := bucket.within.sum()) is not SumStatus.ENDED:
                yield found is SumStatus.PROGRESSED
            yield from self._add_carried()
        else:
            yield from self._reduce_between(number)
        if bucket.on_device is not None:
            bucket.on_device.copy_(bucket.mine)

    def _reduce_between(self, number: int) -> Iterator[bool]:
        bucket, memory = self._buckets[number], self._memory
        first_tag = self._take_tags(2 * len(bucket.parts))  # two per chunk
        arrived, summed = memory.begin_round(number)
        memory.raise_flag(arrived)
        if self._place.column:
            yield from until(lambda: memory.raised(arrived, by=range(len(bucket.buckets))))
            yield from self._all_chunks(bucket, first_tag=first_tag)
        memory.raise_flag(summed)
        yield from until(lambda: memory.raised(summed, by=range(self._place.num_carriers)))

    def _add_carried(self) -> Iterator[bool]:
        """Counts a reduced bucket. After the last bucket, sums the numbers that the ranks sum along with the buckets.

        Yields like the generator of `reduce`, while it waits for the numbers of other ranks.
        """
        carried = self._carried
        if carried is None:
            return
        carried.to_end -= 1
        if carried.to_end == 0:
            self._carried = None
            yield from self._all_written(carried.written)
            self._memory.add_numbers(carried.written, carried.numbers)

    def _all_written(self, written: Flag) -> Iterator[bool]:
        return until(lambda: self._memory.raised(written, by=range(len(self._place.locals))))

    def _all_chunks(self, bucket: _Planned, *, first_tag: int) -> Iterator[bool]:
        """Reduces this rank's parts of a bucket in order, up to `in_flight` parts at a time."""
        active: deque[Iterator[bool]] = deque()
        for number in range(len(bucket.parts)):
            active.append(self._chunk(bucket, number, tag=(first_tag + 2 * number) % NUM_TAGS))
            while len(active) >= self._in_flight:
                yield from one_round(active)
        while active:
            yield from one_round(active)

    def _chunk(self, bucket: _Planned, number: int, *, tag: int) -> Iterator[bool]:
        part = bucket.parts[number]
        if part.numel == 0:
            return
        buckets = [memory[part.begin : part.end] for memory in bucket.buckets]
        loan = self._scratch.loan()
        values = buckets[0]
        if len(buckets) > 1:
            values = loan.values(part.numel, dtype=values.dtype)
            sum_into(values, buckets)
        spans = cut(ElemRange(0, part.numel), num_parts=self._place.num_nodes)
        wire = Wire(
            transport=self._transport,
            codec=self._codec,
            feedback=bucket.feedback[number] if bucket.feedback else self._no_feedback,
            tag=tag,
            scratch=loan.bytes,
            send=self._send,
        )
        cut_part = Part(
            values=values,
            offsets=[0, *(span.end for span in spans)],
            peers=self._place.column,
            mine=self._place.node,
        )
        yield from self._exchange(cut_part, wire, deliver=self._deliver_into(buckets, spans))
        loan.end()

    def _deliver_into(
        self, buckets: Sequence[torch.Tensor], spans: Sequence[ElemRange]
    ) -> Callable[[int, torch.Tensor], None]:
        """Returns a function that decodes a slice once and copies it into the bucket of every rank of the node.

        buckets: the bucket of each of the node's ranks.
        spans: for each owner of a slice, the range of the slice in the bucket.
        """

        def deliver(owner: int, data: torch.Tensor) -> None:
            span = spans[owner]
            first = buckets[0][span.begin : span.end]
            self._codec.decode(data, out=first)
            for other in buckets[1:]:
                other[span.begin : span.end].copy_(first)

        return deliver

    def _forget_plan(self) -> None:
        self._buckets = []
