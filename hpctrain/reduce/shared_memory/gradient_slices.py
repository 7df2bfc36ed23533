"""Where a run of a bucket's elements lies in gradient space. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.shared_memory.partition import ElemRange


@dataclass(frozen=True, slots=True)
class Tile:
    """`numel` elements: from `first` in the run, and from `position` in gradient space."""

    first: int
    position: int
    numel: int


def tiles(bucket: Bucket, span: ElemRange) -> Iterator[Tile]:
    """The gradients among the elements of `span` of `bucket`; gap and flags are in no tile."""
    for slot in bucket.slots:
        begin, end = max(span.begin, slot.offset), min(span.end, slot.offset + slot.numel)
        if begin < end:
            yield Tile(begin - span.begin, slot.position + begin - slot.offset, end - begin)
