"""Plans which rank owns which elements, and which elements are reduced together. Does not communicate.

Each bucket's gradients are split over all ranks into contiguous shares. A unit consists of the elements that one
reduction sums: those of a whole bucket or, if the bucket is too large for the memory of a unit, an equal part of each
rank's share of the bucket. `BucketProgress` tracks which gradients of a step are ready, and which bucket is reduced
next.
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
    """The elements that one reduction sums, and one all-gather gathers.

    bucket: index of the bucket to which the elements belong.
    dtype: dtype of the bucket.
    parts: for each rank, the elements of the bucket that the rank owns. In the unit's memory the parts follow each
    other.
    spans: for each rank, the runs of parameters' elements in its part, with their positions in the unit's memory.
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
        """Returns the spans of all ranks. Spans that are adjacent in the same parameter are joined."""
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
        """Plans the share of each bucket that each rank owns, and the units: the elements that one reduction sums.

        unit_bytes: largest size of a unit's gradients, in bytes.
        align_elems: shares end at multiples of this number of elements within a parameter.
        """
        shares = tuple(shares_of(bucket, num_ranks=num_ranks, align_elems=align_elems) for bucket in buckets)
        units = [
            unit
            for number, bucket in enumerate(buckets)
            for unit in _units_of(number, bucket, shares[number], unit_bytes=unit_bytes)
        ]
        return cls(tuple(buckets), shares, tuple(units))

    def owned_by(self, rank: int) -> list[list[ParameterSpan]]:
        """Returns, for each bucket, the spans that a rank owns, at most one per parameter.

        The `place` of a span is its position in the rank's share.
        """
        return [
            list(_spans(bucket, shares[rank], place=0))
            for bucket, shares in zip(self.buckets, self.shares, strict=True)
        ]


def shares_of(bucket: Bucket, *, num_ranks: int, align_elems: int) -> tuple[ElemRange, ...]:
    """Splits a bucket's gradients over the ranks into ranges whose lengths are nearly equal; some may be empty.

    Ranges end at multiples of `align_elems` within a parameter, or at the end of the bucket.
    """
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
    """Yields the runs of parameters' elements within the range `part` of the bucket.

    place: position of the first element of `part` in the buffer.
    """
    for slot in bucket.slots:
        begin, end = max(part.begin, slot.offset), min(part.end, slot.offset + slot.numel)
        if begin < end:
            yield ParameterSpan(slot.parameter, begin - slot.offset, end - begin, place + begin - part.begin)


@final
class BucketProgress:
    """Tracks the progress of one step at a time: which gradients are ready, and which buckets are complete.

    buckets: for each bucket, the indices of its parameters.

    order: indices of the buckets in the order in which they are reduced, the same on every rank; at first ascending.
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
        """Indices of the buckets that backward has completed in this step, in the order of their completion."""
        return self._completed

    def gradient_is_ready(self, index: int) -> bool:
        """Records that the gradient of parameter `index` is ready. Returns True if the bucket is now complete.

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
        """Marks all gradients as ready and all buckets as complete: no more gradients come in this step."""
        self._ready = set(self._bucket_of)
        self._waiting_for = [0] * len(self._waiting_for)

    def take_complete(self) -> Iterator[int]:
        """Yields the indices of the next complete buckets in order, up to the first bucket that is not complete."""
        while self._num_taken < len(self.order) and self._waiting_for[self.order[self._num_taken]] == 0:
            yield self.order[self._num_taken]
            self._num_taken += 1  # only if taking it has not failed

    def completed_order(self) -> list[int]:
        """Returns the indices of completed buckets in the order of completion, then those of all other buckets."""
        known = set(self._completed)
        return [*self._completed, *(bucket for bucket in self.order if bucket not in known)]
