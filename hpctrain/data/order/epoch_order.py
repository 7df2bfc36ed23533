"""Order of the samples: a pure function of seed, epoch and position, the same for any number of ranks.

This module has the interface of orders, the full shuffle, and the division of positions into batches and ranks' parts.
The other orders are in `block_shuffle`, `weighted` and `stratified`; `order_spec` selects the order of a run.
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
from hpctrain.storage import part_of

# Recorded in checkpoints with the position, since a position is another sample in another order.
ORDER_NAME = "feistel-1"


class Order(Protocol):
    """Order of one epoch: maps positions to samples. Immutable; equal on every rank."""

    @property
    def num_samples(self) -> int:
        """Number of positions in the epoch. In a weighted order a sample may have several positions, or none."""

    @property
    def epoch(self) -> int: ...

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the sample indices at positions start, ..., stop - 1: int64, shape (stop - start,).

        Time and memory depend on stop - start only. Raises DataError if the range is not within the epoch.
        """


class LastBatch(str, Enum):
    """What to do with an incomplete global batch at the end of an epoch."""

    KEEP = "keep"  # a smaller batch
    DROP = "drop"  # leave it out
    PAD = "pad"  # a full batch: its samples are repeated, with weight 0


class Span(NamedTuple):
    """Range of positions start, ..., stop - 1."""

    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


def check_order(*, num_samples: int, seed: int, epoch: int, max_samples: int = MAX_VALUES) -> None:
    """Raises DataError if `num_samples` is out of range, RecipeError if `seed` or `epoch` is negative."""
    if not 0 <= num_samples <= max_samples:
        raise DataError(f"an order of {num_samples} samples is not possible: 0 to {max_samples} are")
    if seed < 0 or epoch < 0:
        raise RecipeError(f"seed {seed} and epoch {epoch} must not be negative")


def positions(start: int, stop: int, *, num_samples: int) -> NDArray[np.int64]:
    """Returns start, ..., stop - 1 as int64. Raises DataError if the range is not within the epoch."""
    if not 0 <= start <= stop <= num_samples:
        raise DataError(f"positions {start} to {stop} were requested from an epoch of {num_samples} samples")
    return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """Order of all samples in one epoch: a permutation that depends on (seed, epoch), or as stored."""

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
    """Returns this rank's contiguous part of positions start, ..., stop - 1.

    The parts of ranks 0, 1, ... are consecutive, and their sizes differ by at most one (the first ranks have the
    larger ones). With fewer positions than ranks some are empty. Raises DataError if `rank` is out of range.
    """
    if not 0 <= rank < num_ranks:
        raise DataError(f"rank {rank} is not one of {num_ranks} ranks")
    first, last = part_of(stop - start, part=rank, num_parts=num_ranks)
    return Span(start + first, start + last)


def num_batches(num_samples: int, *, global_batch: int, last_batch: LastBatch, start: int = 0) -> int:
    """Returns the number of global batches from position `start` to the end of the epoch."""
    whole, rest = divmod(num_samples - start, global_batch)
    return whole + (rest > 0 and last_batch is not LastBatch.DROP)


def batch_spans(
    num_samples: int, *, global_batch: int, last_batch: LastBatch, start: int = 0
) -> Iterator[Span]:
    """Yields the positions of each global batch from `start` on. Independent of the number of ranks.

    `start` counts samples, not batches, so that a run can resume with another batch size. The last span is the same
    for `keep` and `pad`: the remaining positions of the epoch.
    """
    count = num_batches(num_samples, global_batch=global_batch, last_batch=last_batch, start=start)
    for number in range(count):
        first = start + number * global_batch
        yield Span(first, min(first + global_batch, num_samples))
