"""Computes the sample indices that one rank reads for one global batch. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import LastBatch, Order, Span, rank_share


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchPlan:
    """One rank's part of a global batch.

    indices: int64, shape (num_samples + num_padded,): this rank's samples, then repeated samples as padding.
    start, global_samples: position and length of the global batch in the epoch, in samples, without padding.
    num_skipped: samples of this rank that were left out because they are damaged.
    """

    epoch: int
    start: int
    global_samples: int
    indices: NDArray[np.int64]
    num_samples: int
    num_skipped: int = 0

    @property
    def num_padded(self) -> int:
        return len(self.indices) - self.num_samples


def plan_batch(
    order: Order, *, span: Span, global_batch: int, last_batch: LastBatch, rank: int, num_ranks: int
) -> BatchPlan:
    """Returns this rank's part of the global batch at positions `span` of the epoch.

    With LastBatch.PAD a shorter batch is filled up to `global_batch` by repeating its samples from the first on,
    and then divided among the ranks.
    """
    length = global_batch if last_batch is LastBatch.PAD else span.num_samples
    share = rank_share(span.start, span.start + length, rank=rank, num_ranks=num_ranks)
    real = Span(min(share.start, span.stop), min(share.stop, span.stop))
    indices = order.at(*real)
    num_padded = share.num_samples - real.num_samples
    if num_padded:
        first = max(share.start, span.stop) - span.stop
        padding = _over_again(order, span=span, first=first, count=num_padded)
        indices = np.concatenate([indices, padding])
    return BatchPlan(
        epoch=order.epoch,
        start=span.start,
        global_samples=span.num_samples,
        indices=indices,
        num_samples=real.num_samples,
    )


def _over_again(order: Order, *, span: Span, first: int, count: int) -> NDArray[np.int64]:
    """Returns elements first, ..., first + count - 1 of the endlessly repeated samples of `span`."""
    if count >= span.num_samples:
        return order.at(*span)[np.arange(first, first + count) % span.num_samples]
    begin = span.start + first % span.num_samples
    head = order.at(begin, min(begin + count, span.stop))
    return np.concatenate([head, order.at(span.start, span.start + count - len(head))])
