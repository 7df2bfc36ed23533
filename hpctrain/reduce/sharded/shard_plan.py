"""Which rank owns which elements, what is reduced together, and which bucket is next. Does not communicate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch

from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.data_parallel.gradient_buckets import ran_twice
from hpctrain.reduce.shared_memory.shared_buckets import ElemRange, cut

# Which rank owns which elements of which parameters, and what is reduced together. Pure planning.
#
# Each bucket's gradients are split over all ranks into contiguous shares. A unit, what one reduction sums,
# is a bucket, or, of a bucket that is too large for the memory of a unit, an equal part of each rank's
# share.


# Shares end at multiples of this within a parameter: the vectorised kernels of an optimizer then treat each element as
# they do in the whole parameter, whose last elements they may round differently.
ALIGNMENT_ELEMS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """`numel` contiguous elements of a parameter, from `begin` in its memory order; in a buffer they are at `place`."""

    parameter: int
    begin: int
    numel: int
    place: int


@dataclass(frozen=True, slots=True)
class Unit:
    """What is reduced and gathered at once. parts: of each rank's share of the bucket, the elements that belong to it.

    They lie one after another in the unit's memory.
    """

    bucket: int
    dtype: torch.dtype
    parts: tuple[ElemRange, ...]
    spans: tuple[tuple[Span, ...], ...]  # of each rank's part; places in the unit's memory

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Place of each rank's part in the unit's memory, and the end of the last."""
        return tuple(accumulate((part.numel for part in self.parts), initial=0))

    def joined(self) -> list[Span]:
        """Returns the spans of all ranks, those that are neighbours in a parameter as one."""
        found: list[Span] = []
        for span in (span for spans in self.spans for span in spans):
            last = found[-1] if found else None
            if (
                last is not None
                and last.parameter == span.parameter
                and last.begin + last.numel == span.begin
            ):
                found[-1] = Span(last.parameter, last.begin, last.numel + span.numel, last.place)
            else:
                found.append(span)
        return found


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """shares: by bucket and rank, in elements of the bucket. units: in the order of the buckets."""

    buckets: tuple[Bucket, ...]
    shares: tuple[tuple[ElemRange, ...], ...]
    units: tuple[Unit, ...]

    @classmethod
    def of(
        cls,
        buckets: Sequence[Bucket],
        *,
        num_ranks: int,
        unit_bytes: int,
        align_elems: int = ALIGNMENT_ELEMS,
    ) -> ShardPlan:
        """unit_bytes: maximum size of a unit's gradients, up to one element a rank."""
        shares = tuple(shares_of(bucket, num_ranks=num_ranks, align_elems=align_elems) for bucket in buckets)
        units = [
            unit
            for number, bucket in enumerate(buckets)
            for unit in _units_of(number, bucket, shares[number], unit_bytes=unit_bytes)
        ]
        return cls(tuple(buckets), shares, tuple(units))

    def owned_by(self, rank: int) -> list[list[Span]]:
        """Returns what a rank owns, by bucket; places in its share. At most one span of a parameter."""
        return [
            list(_spans(bucket, shares[rank], place=0))
            for bucket, shares in zip(self.buckets, self.shares, strict=True)
        ]


def shares_of(bucket: Bucket, *, num_ranks: int, align_elems: int) -> tuple[ElemRange, ...]:
    """Splits a bucket's gradients over the ranks. Lengths differ by less than `align_elems` and one; some may be 0."""
    even = cut(ElemRange(0, bucket.num_gradients), num_parts=num_ranks)
    starts = [slot.offset for slot in bucket.slots]

    def aligned(place: int) -> int:
        within = place - starts[bisect_right(starts, place) - 1]
        return place - within % align_elems

    ends = [*(aligned(span.end) for span in even[:-1]), bucket.num_gradients]
    return tuple(ElemRange(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True))


def _units_of(number: int, bucket: Bucket, shares: Sequence[ElemRange], *, unit_bytes: int) -> Iterator[Unit]:
    most_elems = max(1, unit_bytes // bucket.dtype.itemsize)
    num_units = max(1, -(-bucket.num_gradients // most_elems))
    by_rank = [cut(share, num_parts=num_units) for share in shares]
    for parts in zip(*by_rank, strict=True):
        places = accumulate((part.numel for part in parts), initial=0)
        spans = tuple(
            tuple(_spans(bucket, part, place=place)) for part, place in zip(parts, places, strict=False)
        )
        yield Unit(number, bucket.dtype, tuple(parts), spans)


def _spans(bucket: Bucket, part: ElemRange, *, place: int) -> Iterator[Span]:
    """Yields the parameters' elements within `part` of the bucket; `place`: of its first element."""
    for slot in bucket.slots:
        begin, end = max(part.begin, slot.offset), min(part.end, slot.offset + slot.numel)
        if begin < end:
            yield Span(slot.parameter, begin - slot.offset, end - begin, place + begin - part.begin)


# Which gradients of a step are ready, and which bucket is reduced next. Does not communicate.


@final
class BucketProgress:
    """Of one step at a time. buckets: the numbers of the parameters of each.

    order: in which the buckets are reduced, the same on every rank; at first that of `buckets`.
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
        """Returns the numbers of the bucket's parameters."""
        return self._indices[bucket]

    @property
    def has_begun(self) -> bool:
        """True if a gradient of this step is ready."""
        return bool(self._ready)

    def is_ready(self, index: int) -> bool:
        """Returns True if the gradient of this step is ready."""
        return index in self._ready

    @property
    def ready(self) -> Iterable[int]:
        """The parameters whose gradient of this step is ready."""
        return self._ready

    @property
    def completed(self) -> Sequence[int]:
        """The buckets that backward has completed, in this order."""
        return self._completed

    def gradient_is_ready(self, index: int) -> bool:
        """Notes it. Returns True if its bucket is complete. Raises UsageError for the second time in a step."""
        if index in self._ready:
            raise ran_twice()
        self._ready.add(index)
        bucket = self._bucket_of[index]
        self._waiting_for[bucket] -= 1
        if self._waiting_for[bucket] == 0:
            self._completed.append(bucket)
        return self._waiting_for[bucket] == 0

    def end_backward(self) -> None:
        """No more gradients are coming: of unused parameters, or of all on ranks without samples."""
        self._ready = set(self._bucket_of)
        self._waiting_for = [0] * len(self._waiting_for)

    def take_complete(self) -> Iterator[int]:
        """Yields the next complete buckets, in the order, up to one that is not."""
        while self._num_taken < len(self.order) and self._waiting_for[self.order[self._num_taken]] == 0:
            yield self.order[self._num_taken]
            self._num_taken += 1  # not if taking it has failed

    def completed_order(self) -> list[int]:
        """Returns the order in which buckets were completed, those that were not at the end."""
        known = set(self._completed)
        return [*self._completed, *(bucket for bucket in self.order if bucket not in known)]
