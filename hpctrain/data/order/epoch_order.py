"""Which sample when: a pure function of seed, epoch and position, the same for any number of ranks.

Here: what an order is, the full shuffle, and how positions become batches and ranks' parts. The other orders
are in `block_shuffle`, `weighted` and `stratified`; `order_spec` says which one a run uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.permutation import MAX_VALUES, epoch_key, permute
from hpctrain.errors import DataError, RecipeError

# A checkpoint that keeps a place in the data can record this: positions of another order mean other samples.
ORDER_NAME = "feistel-1"


class Order(Protocol):
    """The order of one epoch: which sample is at which position. A pure value; equal on every rank."""

    @property
    def num_samples(self) -> int:
        """Positions in the epoch. A sample may be at several of them, or at none, in a weighted order."""

    @property
    def epoch(self) -> int: ...

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Sample indices at positions start, ..., stop - 1 of the epoch: int64, shape (stop - start,).

        Time and memory grow with stop - start only. Raises DataError if the span leaves the epoch.
        """


class LastBatch(str, Enum):
    """What becomes of the samples that do not fill a whole global batch at the end of an epoch."""

    KEEP = "keep"  # a smaller batch
    DROP = "drop"
    PAD = "pad"  # a full batch: samples of it are repeated, and weigh nothing


class Span(NamedTuple):
    """Positions start, ..., stop - 1."""

    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


def check_order(*, num_samples: int, seed: int, epoch: int, max_samples: int = MAX_VALUES) -> None:
    """Raises DataError or RecipeError for an order that cannot be."""
    if not 0 <= num_samples <= max_samples:
        raise DataError(f"an order of {num_samples} samples was asked, 0 to {max_samples} are possible")
    if seed < 0 or epoch < 0:
        raise RecipeError(f"seed {seed} and epoch {epoch} must not be negative")


def positions(start: int, stop: int, *, num_samples: int) -> NDArray[np.int64]:
    """start, ..., stop - 1. Raises DataError if that leaves the epoch."""
    if not 0 <= start <= stop <= num_samples:
        raise DataError(f"positions {start} to {stop} were asked of an epoch of {num_samples} samples")
    return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """The order of the samples in one epoch. Shuffled, it is another permutation for each (seed, epoch)."""

    num_samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_order(num_samples=self.num_samples, seed=self.seed, epoch=self.epoch)

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """See `Order.at`."""
        where = positions(start, stop, num_samples=self.num_samples)
        if not self.shuffle or start == stop:
            return where
        return permute(where, num_values=self.num_samples, key=epoch_key(self.seed, self.epoch))


def rank_share(start: int, stop: int, *, rank: int, num_ranks: int) -> Span:
    """This rank's contiguous part of positions start, ..., stop - 1.

    The parts of ranks 0, 1, ... follow each other, and their sizes differ by at most one (the first ranks
    have the larger ones). With fewer positions than ranks some are empty.
    """
    if not 0 <= rank < num_ranks:
        raise DataError(f"rank {rank} is not one of {num_ranks} ranks")
    share, extra = divmod(stop - start, num_ranks)
    first = start + rank * share + min(rank, extra)
    return Span(first, first + share + (rank < extra))


def num_batches(num_samples: int, *, global_batch: int, last_batch: LastBatch, start: int = 0) -> int:
    """Global batches from position `start` to the end of the epoch."""
    whole, rest = divmod(num_samples - start, global_batch)
    return whole + (rest > 0 and last_batch is not LastBatch.DROP)


def batch_spans(
    num_samples: int, *, global_batch: int, last_batch: LastBatch, start: int = 0
) -> Iterator[Span]:
    """The positions of each global batch from `start` on. Independent of the number of ranks.

    `start` counts samples, not batches, so that a run may go on with another batch size. The last span is
    the same for `keep` and `pad`: the positions of the epoch that are left.
    """
    count = num_batches(num_samples, global_batch=global_batch, last_batch=last_batch, start=start)
    for number in range(count):
        first = start + number * global_batch
        yield Span(first, min(first + global_batch, num_samples))
