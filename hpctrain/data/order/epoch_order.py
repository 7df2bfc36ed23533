"""Order of the samples: a pure function of seed, epoch and position, the same for any number of ranks.

This module contains the interface of orders, the order that shuffles all samples, and the division of positions into
batches and into parts of ranks. The other orders, and the classes that choose an order, are in `order_spec`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
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
    """Interface of the order of one epoch, which maps positions to samples. Immutable, and equal on every rank."""

    @property
    def num_samples(self) -> int:
        """Number of positions in the epoch. In a weighted order a sample may have several positions, or none."""

    @property
    def epoch(self) -> int: ...

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the sample indices at positions start to stop - 1: int64, shape (stop - start,).

        Time and memory depend only on stop - start. Raises DataError if the range is not within the epoch.
        """


class LastBatch(str, Enum):
    """What to do with an incomplete global batch at the end of an epoch.

    KEEP: Return a smaller batch.
    DROP: Leave the batch out.
    PAD: Fill the batch by repeating its samples. The repeated samples have weight 0.
    """

    KEEP = "keep"  # a smaller batch
    DROP = "drop"  # leave it out
    PAD = "pad"  # a full batch: its samples are repeated, with weight 0


class PositionRange(NamedTuple):
    """The range of positions from start to stop - 1."""

    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


def check_order(*, num_samples: int, seed: int, epoch: int, max_samples: int = MAX_VALUES) -> None:
    """Raises DataError if `num_samples` is not in 0 to `max_samples`, RecipeError if `seed` or `epoch` is negative."""
    if not 0 <= num_samples <= max_samples:
        raise DataError(f"an order cannot have {num_samples} samples: 0 to {max_samples} are possible")
    if seed < 0 or epoch < 0:
        raise RecipeError(f"seed {seed} and epoch {epoch} must not be negative")


def positions(start: int, stop: int, *, num_samples: int) -> NDArray[np.int64]:
    """Returns the positions start to stop - 1 as int64. Raises DataError if the range is not within the epoch."""
    if not 0 <= start <= stop <= num_samples:
        raise DataError(f"positions {start} to {stop} were requested from an epoch of {num_samples} samples")
    return np.arange(start, stop, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """Order of all samples in one epoch: a permutation that depends on (seed, epoch), or the stored order.

    Attributes:
        num_samples: Number of samples of the dataset.
        seed: Seed of the permutation; the same on every rank.
        epoch: Number of the epoch, from 0.
        shuffle: True: the order is a permutation. False: the samples come in the order in which they are stored.
    """

    num_samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_order(num_samples=self.num_samples, seed=self.seed, epoch=self.epoch)

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the sample indices at a range of positions. Time and memory depend only on the length of the range.

        Args:
            start: The first position.
            stop: The position after the last position.

        Returns:
            The indices: int64, shape (stop - start,).

        Raises:
            DataError: If the range is not within the epoch.
        """
        where = positions(start, stop, num_samples=self.num_samples)
        if not self.shuffle or start == stop:
            return where
        return permute(where, num_values=self.num_samples, key=epoch_key(self.seed, self.epoch))


def rank_share(start: int, stop: int, *, rank: int, num_ranks: int) -> PositionRange:
    """Divides the positions start to stop - 1 among the ranks, and returns the contiguous part of rank `rank`.

    The parts of ranks 0, 1, ... are consecutive. Their lengths differ by at most one, and the longer parts belong to
    the first ranks. With fewer positions than ranks some parts are empty. Raises DataError if `rank` is out of range.
    """
    if not 0 <= rank < num_ranks:
        raise DataError(f"rank {rank} is not one of {num_ranks} ranks")
    first, last = part_of(stop - start, part=rank, num_parts=num_ranks)
    return PositionRange(start + first, start + last)


def num_batches(num_samples: int, *, global_batch: int, last_batch: LastBatch, start: int = 0) -> int:
    """Returns the number of global batches from position `start` to the end of the epoch."""
    whole, rest = divmod(num_samples - start, global_batch)
    return whole + (rest > 0 and last_batch is not LastBatch.DROP)


# Evaluates an order 4096 positions at a time: for a few positions the calls cost more than the arithmetic.


_BLOCK_POSITIONS = 4096
# Several threads make batches, so positions on both sides of a block border are needed.
_KEPT_BLOCKS = 3
# With more ranks, each needs only a small part of a block.
_MOST_RANKS = 4


def ahead_for(order: Order, *, num_ranks: int) -> Order:
    """Returns `order`, or for few ranks a wrapper of `order` that computes many positions at once and caches them.

    With more ranks, each rank needs only a small part of these positions, so the wrapper (`OrderAhead`) saves no time.
    """
    return OrderAhead(order) if num_ranks <= _MOST_RANKS else order


class OrderAhead:
    """Wraps an order of samples: computes 4096 positions at once, and caches the last 3 such blocks. Thread-safe.

    A block takes 32 KiB.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    @property
    def num_samples(self) -> int:
        return self._order.num_samples

    @property
    def epoch(self) -> int:
        return self._order.epoch

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the sample indices at positions start to stop - 1, as `Order.at` does."""
        inside = 0 <= start < stop <= self.num_samples
        if not inside or stop - start >= _BLOCK_POSITIONS:
            return self._order.at(start, stop)
        first, last = start // _BLOCK_POSITIONS, (stop - 1) // _BLOCK_POSITIONS
        begin = start - first * _BLOCK_POSITIONS
        blocks = [self._block(number) for number in range(first, last + 1)]
        positions = blocks[0] if first == last else np.concatenate(blocks)
        return positions[begin : begin + stop - start].copy()

    def _block(self, number: int) -> NDArray[np.int64]:
        with self._lock:
            block = self._blocks.get(number)
            if block is None:
                begin = number * _BLOCK_POSITIONS
                block = self._order.at(begin, min(begin + _BLOCK_POSITIONS, self.num_samples))
                self._blocks[number] = block
                if len(self._blocks) > _KEPT_BLOCKS:
                    self._blocks.popitem(last=False)
            return block


# Computes the sample indices that one rank reads for one global batch. Pure.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchPlan:
    """Lists the samples that are one rank's part of a global batch.

    Attributes:
        epoch: Number of the epoch, from 0.
        start: Position in the epoch of the first sample of the global batch, in samples over all ranks.
        global_samples: Number of samples of all ranks in the global batch, without padding.
        indices: Indices in the dataset of this rank's samples, followed by the indices of repeated samples as padding:
            int64, shape (num_samples + num_padded,).
        num_samples: Number of samples of this rank, without padding.
        num_skipped: Number of samples of this rank that were left out because they are damaged.
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
    order: Order, *, span: PositionRange, global_batch: int, last_batch: LastBatch, rank: int, num_ranks: int
) -> BatchPlan:
    """Returns which samples rank `rank` reads for the global batch at positions `span` of the epoch.

    With LastBatch.PAD a batch of fewer than `global_batch` samples is first filled up, by repeating its samples from
    the first on, and then divided among the ranks.
    """
    length = global_batch if last_batch is LastBatch.PAD else span.num_samples
    share = rank_share(span.start, span.start + length, rank=rank, num_ranks=num_ranks)
    real = PositionRange(min(share.start, span.stop), min(share.stop, span.stop))
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


def _over_again(order: Order, *, span: PositionRange, first: int, count: int) -> NDArray[np.int64]:
    """Returns `count` sample indices, from index `first` on, of the endlessly repeated samples at positions `span`."""
    if count >= span.num_samples:
        return order.at(*span)[np.arange(first, first + count) % span.num_samples]
    begin = span.start + first % span.num_samples
    head = order.at(begin, min(begin + count, span.stop))
    return np.concatenate([head, order.at(span.start, span.start + count - len(head))])


# A short value by which to see that two runs had the same samples, however many ranks shared them.


def sample_sum(indices: NDArray[np.int64]) -> int:
    """Returns the sum, modulo 2^64, of a 64-bit hash of each sample index.

    The sum does not depend on the order of the samples. The sums of the parts of all ranks add up, modulo 2^64, to the
    sum of the whole batch. Two different sets of samples have the same sum with a probability of 2^-64. Source of the
    hash: Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195 (SplitMix64).
    """
    mixed = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def add_sample_sums(parts: Iterable[str]) -> str:
    """Adds the results of `sample_sum` of several ranks modulo 2^64.

    All sums, also the result, are texts of 16 hexadecimal digits.
    """
    return show_sample_sum(sum(int(part, 16) for part in parts))


def show_sample_sum(value: int) -> str:
    """Returns `value`, a result of `sample_sum`, as a text of 16 hexadecimal digits.

    The result is a text, because JSON readers that use floating-point numbers would round a number of 64 bits.
    """
    return f"{value % 2**64:016x}"
