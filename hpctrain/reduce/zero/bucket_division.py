"""Plans which rank owns which elements, and what is reduced together. Does not communicate.

Each bucket's gradients are split over all ranks into contiguous shares. A unit is what one reduction sums: a bucket
or, if a bucket is too large for the memory of a unit, an equal part of each rank's share of it. `BucketProgress`
tracks which gradients of a step are ready, and which bucket is reduced next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch

from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.data_parallel.gradient_memory import ran_twice
from hpctrain.reduce.shared_memory.shared_buckets import ElemRange, cut

# Shares end at multiples of this within a parameter, so that the vectorized kernels of an optimizer treat each element
# as they do in the whole parameter, whose last elements they may round differently.
ALIGNMENT_ELEMS = 64


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    """A run of contiguous elements of a parameter, and its place in a buffer.

    parameter: index of the parameter.
    begin: first element, in the parameter's memory order.
    numel: number of elements.
    place: position of the first element in the buffer.
    """

    parameter: int
    begin: int
    numel: int
    place: int


@dataclass(frozen=True, slots=True)
class ReductionUnit:
    """The elements that are reduced and gathered at once.

    bucket: number of the bucket that they are from.
    parts: for each rank, its elements of the bucket; in the unit's memory these parts follow each other.
    spans: for each rank, the parameters' elements in its part, with places in the unit's memory.
    """

    bucket: int
    dtype: torch.dtype
    parts: tuple[ElemRange, ...]
    spans: tuple[tuple[ParameterSpan, ...], ...]  # for each rank

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Position of each rank's part in the unit's memory, and the end of the last part."""
        return tuple(accumulate((part.numel for part in self.parts), initial=0))

    def joined(self) -> list[ParameterSpan]:
        """Returns the spans of all ranks; spans that are adjacent in a parameter are joined."""
        found: list[ParameterSpan] = []
        for span in (span for spans in self.spans for span in spans):
            last = found[-1] if found else None
            if (
                last is not None
                and last.parameter == span.parameter
                and last.begin + last.numel == span.begin
            ):
                found[-1] = ParameterSpan(last.parameter, last.begin, last.numel + span.numel, last.place)
            else:
                found.append(span)
        return found


@dataclass(frozen=True, slots=True)
class BucketDivision:
    """The division of the buckets over the ranks.

    buckets: the buckets.
    shares: for each bucket, the elements that each rank owns.
    units: units of all buckets, in the order of the buckets.
    """

    buckets: tuple[Bucket, ...]
    shares: tuple[tuple[ElemRange, ...], ...]
    units: tuple[ReductionUnit, ...]

    @classmethod
    def of(
        cls,
        buckets: Sequence[Bucket],
        *,
        num_ranks: int,
        unit_bytes: int,
        align_elems: int = ALIGNMENT_ELEMS,
    ) -> BucketDivision:
        """Plans shares and units. unit_bytes: largest size of a unit's gradients, but at least one element per rank."""
        shares = tuple(shares_of(bucket, num_ranks=num_ranks, align_elems=align_elems) for bucket in buckets)
        units = [
            unit
            for number, bucket in enumerate(buckets)
            for unit in _units_of(number, bucket, shares[number], unit_bytes=unit_bytes)
        ]
        return cls(tuple(buckets), shares, tuple(units))

    def owned_by(self, rank: int) -> list[list[ParameterSpan]]:
        """Returns for each bucket the spans that a rank owns, at most one per parameter.

        Their places are positions in the rank's share.
        """
        return [
            list(_spans(bucket, shares[rank], place=0))
            for bucket, shares in zip(self.buckets, self.shares, strict=True)
        ]


def shares_of(bucket: Bucket, *, num_ranks: int, align_elems: int) -> tuple[ElemRange, ...]:
    """Splits a bucket's gradients over the ranks. Lengths differ by at most `align_elems`; some may be 0."""
    even = cut(ElemRange(0, bucket.num_gradients), num_parts=num_ranks)
    starts = [slot.offset for slot in bucket.slots]

    def aligned(place: int) -> int:
        within = place - starts[bisect_right(starts, place) - 1]
        return place - within % align_elems

    ends = [*(aligned(span.end) for span in even[:-1]), bucket.num_gradients]
    return tuple(ElemRange(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True))


def _units_of(
    number: int, bucket: Bucket, shares: Sequence[ElemRange], *, unit_bytes: int
) -> Iterator[ReductionUnit]:
    most_elems = max(1, unit_bytes // bucket.dtype.itemsize)
    num_units = max(1, -(-bucket.num_gradients // most_elems))
    by_rank = [cut(share, num_parts=num_units) for share in shares]
    for parts in zip(*by_rank, strict=True):
        places = accumulate((part.numel for part in parts), initial=0)
        spans = tuple(
            tuple(_spans(bucket, part, place=place)) for part, place in zip(parts, places, strict=False)
        )
        yield ReductionUnit(number, bucket.dtype, tuple(parts), spans)


def _spans(bucket: Bucket, part: ElemRange, *, place: int) -> Iterator[ParameterSpan]:
    """Yields the parameters' elements within `part` of the bucket. place: position of its first element."""
    for slot in bucket.slots:
        begin, end = max(part.begin, slot.offset), min(part.end, slot.offset + slot.numel)
        if begin < end:
            yield ParameterSpan(slot.parameter, begin - slot.offset, end - begin, place + begin - part.begin)


@final
class BucketProgress:
    """Tracks the progress of one step at a time: which gradients are ready, and which buckets are complete.

    buckets: for each bucket, the indices of its parameters.

    order: order in which the buckets are reduced, the same on every rank; at first that of `buckets`.
    """

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self._indices = buckets
        self._bucket_of = {index: number for number, of in enumerate(self._indices) for index in of}
        self.order = list(range(len(buckets)))
        self.begin_step()

    def begin_step(self) -> None:
        self._ready: set[int] = set()
        self._waiting_for = list(map(len, self._indices))
        self._completed: list[int] = []
        self._num_taken = 0

    def indices(self, bucket: int) -> Sequence[int]:
        """Returns the indices of the bucket's parameters."""
        return self._indices[bucket]

    @property
    def has_begun(self) -> bool:
        """True if any gradient of this step is ready."""
        return bool(self._ready)

    def is_ready(self, index: int) -> bool:
        """Returns True if the gradient of this parameter is ready in this step."""
        return index in self._ready

    @property
    def ready(self) -> Iterable[int]:
        """Indices of the parameters whose gradients are ready in this step."""
        return self._ready

    @property
    def completed(self) -> Sequence[int]:
        """The buckets that backward has completed, in the order of their completion."""
        return self._completed

    def gradient_is_ready(self, index: int) -> bool:
        """Records that a gradient is ready. Returns True if its bucket is complete.

        Raises UsageError for the second gradient of a parameter in one step.
        """
        if index in self._ready:
            raise ran_twice()
        self._ready.add(index)
        bucket = self._bucket_of[index]
        self._waiting_for[bucket] -= 1
        if self._waiting_for[bucket] == 0:
            self._completed.append(bucket)
        return self._waiting_for[bucket] == 0

    def end_backward(self) -> None:
        """Treats all buckets as complete: unused parameters, and ranks without samples, get no more gradients."""
        self._ready = set(self._bucket_of)
        self._waiting_for = [0] * len(self._waiting_for)

    def take_complete(self) -> Iterator[int]:
        """Yields the next complete buckets in order, up to the first that is not complete."""
        while self._num_taken < len(self.order) and self._waiting_for[self.order[self._num_taken]] == 0:
            yield self.order[self._num_taken]
            self._num_taken += 1  # only if taking it has not failed

    def completed_order(self) -> list[int]:
        """Returns the buckets in the order of their completion, followed by those that were not completed."""
        known = set(self._completed)
        return [*self._completed, *(bucket for bucket in self.order if bucket not in known)]
