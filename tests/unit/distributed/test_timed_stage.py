"""The bubble of a stage: the times in which it does not compute."""

from __future__ import annotations

from hpctrain.distributed.pipeline import gaps


def test_gaps_are_what_no_span_covers_whatever_their_order_and_overlap() -> None:
    assert gaps([], begin=1.0, end=2.0) == [(1.0, 2.0)]
    assert gaps([(1.0, 2.0)], begin=1.0, end=2.0) == []
    busy = [(5.0, 6.0), (2.0, 3.0), (2.5, 4.0)]  # a loss within a forward, say
    assert gaps(busy, begin=1.0, end=7.0) == [(1.0, 2.0), (4.0, 5.0), (6.0, 7.0)]
