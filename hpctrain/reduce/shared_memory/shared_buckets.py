"""The buckets of a node's ranks in shared memory, their division, and the flags by which the ranks synchronize.

A bucket is split into chunks, so that sums within the node, encoding and network transfers can work on different chunks
at the same time. Each chunk is split into one part per carrier. A carrier is a rank of a node that has a counterpart
with the same local rank on every other node. Each carrier's part is split into one slice per node. The slice of a node
is owned by the carrier on that node: the owner computes the final sum of the slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, final

import numpy as np
import torch

from hpctrain.comm import Transport
from hpctrain.errors import BufferMismatch
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.shared_memory.summation import Counts
from hpctrain.storage import split_evenly
from hpctrain.topology import Topology


@dataclass(frozen=True, slots=True)
class ElemRange:
    """A range of elements of a bucket: begin <= element < end."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


def cut(span: ElemRange, *, num_parts: int) -> list[ElemRange]:
    """Splits `span` into `num_parts` parts whose lengths differ by at most one element.

    Some parts are empty if `span` has fewer elements than parts.
    """
    counts = split_evenly(span.numel, num_parts=num_parts)
    ends = list(accumulate(counts, initial=span.begin))
    return [ElemRange(begin, end) for begin, end in pairwise(ends)]


def chunks_of(numel: int, *, chunk_elems: int) -> list[ElemRange]:
    """Returns chunks of at most `chunk_elems` elements, as equal as possible; [] for an empty bucket.

    numel: number of elements of the bucket.
    """
    num_chunks = -(-numel // chunk_elems)
    return cut(ElemRange(0, numel), num_parts=num_chunks) if num_chunks else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelPlace:
    """One rank's position in two-level sums.

    A carrier is a rank that has a counterpart with the same local rank on every other node. Carriers exchange data
    between nodes.

    locals: world ranks of this node, in order.
    local: index of this rank in `locals`.
    column: for each node, the world rank of the carrier with this rank's local rank; empty if this rank is not a
    carrier.
    node: index of this node.
    num_nodes: number of nodes.
    num_carriers: number of carriers of each node: the number of ranks on the smallest node.
    """

    locals: tuple[int, ...]
    local: int
    column: tuple[int, ...]
    node: int
    num_nodes: int
    num_carriers: int

    @classmethod
    def of(cls, topology: Topology, *, rank: int) -> TwoLevelPlace:
        node, local = topology.node_of(rank), topology.local_rank_of(rank)
        by_node = topology.groups("local")
        num_carriers = min(map(len, by_node))
        return cls(
            locals=by_node[node],
            local=local,
            # Only this rank's group of `topology.groups("node")`, because all groups contain every rank of the run.
            column=tuple(ranks[local] for ranks in by_node) if local < num_carriers else (),
            node=node,
            num_nodes=topology.num_nodes,
            num_carriers=num_carriers,
        )


def one_rank_nodes(num_ranks: int) -> Topology:
    """Returns a topology with one rank per node, for which a two-level sum is a flat sum."""
    return Topology(tuple((rank,) for rank in range(num_ranks)), tuple(map(str, range(num_ranks))))


def only_node_of(rank: int, topology: Topology) -> Topology:
    """Returns a topology that has only the node of `rank`, for sums within this node. Ranks keep their numbers."""
    node = topology.node_of(rank)
    return Topology(
        (topology.ranks_by_node[node],),
        (topology.node_names[node],),
        topology.emulated,
        (0,) * topology.num_ranks,
    )


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """A run of contiguous elements of one gradient.

    first: offset of the run in the given range of the bucket.
    position: offset of the run in gradient space, the concatenation of all flattened gradients.
    numel: number of elements of the run.
    """

    first: int
    position: int
    numel: int


def gradient_pieces(bucket: Bucket, span: ElemRange) -> Iterator[GradientPiece]:
    """Yields the part of each gradient that lies in the range `span` of `bucket`, without gap and flags."""
    for slot in bucket.slots:
        begin, end = max(span.begin, slot.offset), min(span.end, slot.offset + slot.numel)
        if begin < end:
            yield GradientPiece(begin - span.begin, slot.position + begin - slot.offset, end - begin)


# The buckets of a node's ranks in shared memory, and the flags through which the ranks synchronize.


_ALIGNMENT = 64
# One cache line per flag, so that polling one flag does not slow down writes to another.
_FLAG_BYTES = 64
_FLAG_STEP = _FLAG_BYTES // 8  # distance between flags, in int64 elements
_SPARE_BYTES = 1 << 16
# Maximum count of numbers that ranks can sum in addition to the buckets, in one call.
MAX_NUMBERS = 255
# Each rank's numbers are a flag and two rows with a count and the numbers: a rank writes one row while others may still
# read the other.
_ROW_NUMBERS = 1 + MAX_NUMBERS
_NUMBERS_BYTES = _FLAG_BYTES + 2 * 8 * _ROW_NUMBERS


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that each rank of a node has.

    place: index of the flag among a rank's flags.
    value: the flag counts as raised when it has at least this value.
    """

    place: int
    value: int


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def capacity_of(num_bytes: int) -> int:
    """Returns how many bytes a rank allocates for buckets and flags of `num_bytes`, if its node has several ranks.

    The result is more than `num_bytes`, so that the same gradients can be divided into other buckets, with more flags
    and gaps. The result is aligned, because MPI places the ranks' segments contiguously.
    """
    return _aligned(num_bytes + num_bytes // 16 + _SPARE_BYTES)


@final
class NodeMemory:
    """Shared memory of a node.

    The memory holds, for each rank, the bytes of all buckets, two flags per bucket, and a few numbers. A rank raises
    only its own flags. The values of flags only grow: a flag is set to the number of the reduction, or to a count over
    all reductions. So flags never need to be reset; their 64 bits do not overflow. A rank that is alone on its node
    uses private memory.
    """

    def __init__(self, transport: Transport, *, place: TwoLevelPlace) -> None:
        self._transport = transport
        self._local = place.local
        self._ranks = place.locals
        self._alone = len(place.locals) == 1
        self._memory: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._offsets: list[int] = []
        self._flags: list[Counts] = []
        self._numbers: list[np.ndarray[Any, np.dtype[np.float64]]] = []
        self._rounds: list[int] = []
        self._round_of_numbers = 0

    def lay_out(self, sizes: Sequence[int]) -> bool:
        """Allocates zeroed memory for buckets of these sizes in bytes, in place of the previous buckets.

        The sizes are the same on every rank. Collective over the node. Returns True if existing memory was reused: then
        a barrier must follow before any rank uses the memory, since other ranks may not have reset their flags yet.
        """
        offsets = [_NUMBERS_BYTES + 2 * len(sizes) * _FLAG_BYTES]
        for size in sizes:
            offsets.append(offsets[-1] + _aligned(size))
        again = bool(self._memory) and self._memory[self._local].numel() >= offsets[-1]
        if again:
            self._memory[self._local].zero_()
        else:
            capacity = capacity_of(offsets[-1])
            own = torch.zeros(capacity, dtype=torch.uint8) if self._alone else None
            self._memory = [own] if own is not None else self._transport.share(capacity)
        self._sizes, self._offsets = list(sizes), offsets
        heads = [memory[: offsets[0]].numpy() for memory in self._memory]
        self._flags = [head.view(np.int64) for head in heads]
        self._numbers = [
            head[_FLAG_BYTES:_NUMBERS_BYTES].view(np.float64).reshape(2, _ROW_NUMBERS) for head in heads
        ]
        self._rounds = [0] * len(sizes)
        self._round_of_numbers = 0
        return again

    def segments(self, number: int) -> list[torch.Tensor]:
        """Returns the memory of bucket `number` of each rank of the node, by local rank: uint8, shape (size,)."""
        begin = self._offsets[number]
        return [memory[begin : begin + self._sizes[number]] for memory in self._memory]

    def begin_round(self, number: int) -> tuple[Flag, Flag]:
        """Starts the next reduction of bucket `number`. Returns the flags that a rank raises in this reduction.

        A rank raises the first flag when its bucket is filled, and the second when it has summed its part.
        """
        self._rounds[number] += 1
        full, summed = self.flags_of(number)
        return replace(full, value=self._rounds[number]), replace(summed, value=self._rounds[number])

    def flags_of(self, number: int) -> tuple[Flag, Flag]:
        """Returns the two flags of bucket `number` with their initial value 0."""
        first = _NUMBERS_BYTES // 8 + 2 * number * _FLAG_STEP
        return Flag(place=first, value=0), Flag(place=first + _FLAG_STEP, value=0)

    def counts_of(self, number: int) -> tuple[Counts, ...]:
        """Returns, for each local rank, a view of its two flags of bucket `number`: int64, shape (16,).

        The first flag is element 0, the second flag is element 8.
        """
        first = self.flags_of(number)[0].place
        return tuple(flags[first : first + 2 * _FLAG_STEP] for flags in self._flags)

    def write_numbers(self, numbers: np.ndarray[Any, np.dtype[np.float64]]) -> Flag:
        """Publishes at most MAX_NUMBERS numbers to the node's ranks. Returns the flag that this rank has raised."""
        self._round_of_numbers += 1
        row = self._numbers[self._local][self._round_of_numbers % 2]
        row[0] = len(numbers)
        row[1 : 1 + len(numbers)] = numbers
        flag = Flag(place=0, value=self._round_of_numbers)
        self.raise_flag(flag)
        return flag

    def add_numbers(self, written: Flag, numbers: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Writes the sum of all ranks' published numbers, in rank order, to `numbers`.

        Call it when all ranks have raised the flag `written`. Raises BufferMismatch on every rank if the ranks have
        published different counts of numbers.
        """
        rows = [rows[written.value % 2] for rows in self._numbers]
        counts = [int(row[0]) for row in rows]
        if len(set(counts)) > 1:
            by_rank = ", ".join(f"rank {rank}: {n}" for rank, n in zip(self._ranks, counts, strict=True))
            raise BufferMismatch(
                f"ranks sum different counts of numbers ({by_rank}): pass equally many on each rank",
                agreed=True,
            )
        numbers[:] = rows[0][1 : 1 + len(numbers)]
        for row in rows[1:]:
            numbers += row[1 : 1 + len(numbers)]

    def raise_flag(self, flag: Flag) -> None:
        """Raises this rank's flag. A rank that sees the raised flag also sees what this rank wrote before."""
        if self._alone:
            self._flags[0][flag.place] = flag.value
            return
        self._transport.fence()
        self._flags[self._local][flag.place] = flag.value
        self._transport.fence()

    def raised(self, flag: Flag, *, by: Iterable[int]) -> bool:
        """Returns True if all local ranks in `by` have raised the flag.

        Data that these ranks wrote before they raised the flag can then be read.
        """
        if self._alone:
            return True
        if any(self._flags[local][flag.place] < flag.value for local in by):
            return False
        self._transport.fence()
        return True
