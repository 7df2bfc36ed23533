"""The orders of samples that a loader can use: block-wise, weighted, stratified, shuffled, sequential.

A specification (`OrderSpec`) makes the order of every epoch. Checkpoints record the name of the specification.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import (
    ORDER_NAME,
    EpochOrder,
    Order,
    PositionRange,
    check_order,
    positions,
)
from hpctrain.data.order.permutation import (
    MAX_GROUP_VALUES,
    Direction,
    epoch_key,
    hashes,
    permute,
    permute_groups,
)
from hpctrain.errors import DataError, RecipeError
from hpctrain.storage import hash_of

# Shuffles by blocks within a window: large reads, and nearly the mixing of a full shuffle.
#
# The dataset is cut into blocks of consecutive samples. The blocks are shuffled and divided into windows of
# `window_blocks` blocks; the samples of each window are shuffled among each other. So an epoch reads the
# blocks of one window at a time, each of them completely, and each only once. The order is computed, never
# stored. docs/guides/data-order.md measures how well it mixes.


_BLOCKS, _SAMPLES = 1, 2  # purposes of keys


@dataclass(frozen=True, kw_only=True)
class BlockOrder:
    """Order of one epoch by blocks of consecutive samples. Samples are mixed within windows of several blocks.

    A block has `block_samples` samples; the last block of the dataset may have fewer. A window has `window_blocks`
    blocks. Raises RecipeError if one of the two numbers is below 1.
    """

    num_samples: int
    block_samples: int
    window_blocks: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_order(
            num_samples=self.num_samples, seed=self.seed, epoch=self.epoch, max_samples=MAX_GROUP_VALUES
        )
        if self.block_samples < 1 or self.window_blocks < 1:
            raise RecipeError(
                f"an order in blocks of {self.block_samples} samples, mixed within {self.window_blocks} blocks: "
                "both must be at least 1"
            )

    @property
    def num_blocks(self) -> int:
        return -(-self.num_samples // self.block_samples)

    @property
    def num_windows(self) -> int:
        return -(-self.num_blocks // self.window_blocks)

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the sample indices at positions start to stop - 1, as `Order.at` does."""
        where = positions(start, stop, num_samples=self.num_samples)
        if start == stop:
            return where
        slots, _ = self._slots_at(where)
        windows = slots // self.window_blocks
        first, end = self._first_position(windows), self._first_position(windows + 1)
        mixed = first + permute_groups(
            where - first,
            groups=windows,
            num_values=end - first,
            key=epoch_key(self.seed, self.epoch, purpose=_SAMPLES),
        )
        slots, offsets = self._slots_at(mixed)
        return self._blocks_in(slots) * self.block_samples + offsets

    def windows_of(self, start: int, stop: int) -> range:
        """Returns the indices of the windows that contain the positions start to stop - 1.

        A window consists of several blocks of consecutive samples, which are mixed with each other.
        """
        if start >= stop:
            return range(0)
        slots, _ = self._slots_at(positions(start, stop, num_samples=self.num_samples)[[0, -1]])
        return range(int(slots[0]) // self.window_blocks, int(slots[1]) // self.window_blocks + 1)

    def blocks_of(self, window: int) -> list[PositionRange]:
        """Returns the blocks that are mixed in one window, each as a range of sample indices, ascending.

        `window` is the index of the window in the epoch.
        """
        first = window * self.window_blocks
        slots = np.arange(first, min(first + self.window_blocks, self.num_blocks), dtype=np.int64)
        starts = np.sort(self._blocks_in(slots)) * self.block_samples
        return [PositionRange(int(at), min(int(at) + self.block_samples, self.num_samples)) for at in starts]

    # A slot is the index of a block in the epoch. All blocks have `block_samples` samples, except the dataset's last.

    @cached_property
    def _missing(self) -> int:
        """Number of samples by which the dataset's last block is smaller than the others."""
        return self.num_blocks * self.block_samples - self.num_samples

    @cached_property
    def _short_slot(self) -> int:
        """Slot (index of a block in the epoch) of the dataset's last block, which may be shorter than the others."""
        last = np.array([self.num_blocks - 1])
        key = epoch_key(self.seed, self.epoch, purpose=_BLOCKS)
        return int(permute(last, num_values=self.num_blocks, key=key, direction=Direction.INVERSE)[0])

    def _blocks_in(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        key = epoch_key(self.seed, self.epoch, purpose=_BLOCKS)
        return permute(slots, num_values=self.num_blocks, key=key)

    def _slots_at(self, where: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns two arrays, for the positions `where`: the slot of each position, and its offset in the block.

        The slot of a position is the index, in the epoch, of the block that contains the position.
        """
        after_short = (self._short_slot + 1) * self.block_samples - self._missing
        slots, offsets = np.divmod(where + self._missing * (where >= after_short), self.block_samples)
        return slots, offsets

    def _first_position(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the position in the epoch at which each of `windows` begins; these are indices of windows.

        For the index after the last window, the result is the number of samples in the epoch.
        """
        slots = np.minimum(windows * self.window_blocks, self.num_blocks)
        return slots * self.block_samples - self._missing * (slots > self._short_slot)


# Each sample once per epoch, with the classes in the dataset's proportions in any run of positions.
#
# Sample j of the n samples of a class (in the class's own shuffled order) has the key (j + u) / n, where u
# in [0, 1) is drawn for the class and the epoch; the epoch is sorted by key. Between keys s and t there are
# n (t - s) samples of each class, plus or minus one. So the number of samples of a class among any B
# consecutive positions, with any number of ranks and any batch size, differs from B n / N by at most 1 + K
# n / N (K classes, N samples). No sorted list of the epoch is needed: the keys near a position are computed
# from its number.


_PHASES, _MEMBERS = 4, 5  # purposes of keys


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Strata:
    """Sample indices grouped by class: members[starts[c] : starts[c + 1]] are the samples of class c.

    The indices take 4 bytes per sample in memory, or 8 from 2**32 samples on.
    """

    members: NDArray[np.integer]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, classes: NDArray[np.generic]) -> Strata:
        """Groups samples by class. `classes` is the class of each sample: integers or bool, shape (n,), n > 0.

        Raises DataError for other arrays.
        """
        values = np.asarray(classes)
        if values.ndim != 1 or values.dtype.kind not in "biu" or not len(values):
            raise DataError(
                f"strata are {values.dtype.name} of shape {values.shape}: one integer per sample is needed"
            )
        members = np.argsort(values, kind="stable")
        _, counts = np.unique(values, return_counts=True)
        if len(values) < 1 << 32:
            members = members.astype(np.uint32)
        return cls(members=members, starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    @property
    def num_samples(self) -> int:
        return len(self.members)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of samples of each class, int64."""
        return np.diff(self.starts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StratifiedOrder:
    """Order of one epoch in which every range of positions has the classes in the proportions of the dataset.

    `strata` are the sample indices, grouped by class. The samples are sorted by a pseudorandom key. To compute a range
    of positions, only the keys near the range are computed: one per position, and a few more per class.
    """

    strata: Strata
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_order(num_samples=self.num_samples, seed=self.seed, epoch=self.epoch)

    @property
    def num_samples(self) -> int:
        return self.strata.num_samples

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the sample indices at positions start to stop - 1, as `Order.at` does."""
        where = positions(start, stop, num_samples=self.num_samples)
        if start == stop:
            return where
        counts = self.strata.counts
        numbers = np.arange(len(counts))
        drawn = hashes(epoch_key(self.seed, self.epoch, purpose=_PHASES), numbers)
        phases = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
        # N t of N samples, plus or minus one per class, have a key below t: these bounds enclose the range.
        slack = len(counts) + 1
        before = _members_below((start - slack) / self.num_samples, counts=counts, phases=phases)
        until = _members_below((stop + slack) / self.num_samples, counts=counts, phases=phases)
        near = until - before
        classes = np.repeat(numbers, near)
        # j in each class: before, ..., until - 1
        within = np.arange(len(classes)) - np.repeat(np.cumsum(near) - near, near) + before[classes]
        keys = (within + phases[classes]) / counts[classes]
        chosen = np.lexsort((classes, keys))[start - int(before.sum()) :][: stop - start]
        classes, within = classes[chosen], within[chosen]
        members = permute_groups(
            within,
            groups=classes,
            num_values=counts[classes],
            key=epoch_key(self.seed, self.epoch, purpose=_MEMBERS),
        )
        return self.strata.members[self.strata.starts[classes] + members].astype(np.int64)


def _members_below(
    key: float, *, counts: NDArray[np.int64], phases: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Returns, for each class, the number of samples whose sort key is below `key`: int64, shape (classes,).

    Sample j of a class has the sort key (j + phase) / count. `counts` are the numbers of samples of the classes,
    `phases` their random numbers in [0, 1).
    """
    guess = np.clip(np.ceil(key * counts - phases), 0, counts).astype(np.int64)
    # The product and the quotient are rounded differently: the guess may be off by one.
    guess -= (guess > 0) & ((guess - 1 + phases) / counts >= key)
    guess += (guess < counts) & ((guess + phases) / counts < key)
    return guess


# Draws samples with replacement, with probabilities proportional to their weights.


_DRAWS = 3  # purpose of the key


def cumulative_weights(weights: NDArray[np.generic]) -> NDArray[np.float64]:
    """Returns the cumulative sums of sampling weights: float64, shape (n,). `WeightedOrder` needs them.

    `weights` are numbers, shape (n,). Raises DataError if a weight is negative or not finite, or if the sum of all
    weights is zero or not finite.
    """
    values = np.asarray(weights)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise DataError(
            f"weights are {values.dtype.name} of shape {values.shape}: one number per sample is needed"
        )
    faulty = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(faulty):
        raise DataError(
            f"the weight of sample {faulty[0]} is {values[faulty[0]]}: weights must be finite and not negative"
        )
    # cumsum adds from first to last, so the sums are the same on every machine.
    sums = np.cumsum(values, dtype=np.float64)
    if not len(sums) or not 0 < sums[-1] < np.inf:
        raise DataError(
            f"the weights add up to {sums[-1] if len(sums) else 0}: a positive finite sum is needed"
        )
    return sums


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightedOrder:
    """Order of one epoch in which the sample of each position is drawn independently, with replacement.

    `sums` is the result of `cumulative_weights`, shape (number of samples of the dataset,). `num_samples` is the number
    of draws per epoch. Each position costs one binary search. A sample of weight 0 is never drawn.
    """

    sums: NDArray[np.float64]
    num_samples: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_order(num_samples=self.num_samples, seed=self.seed, epoch=self.epoch)

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the sample indices at positions start to stop - 1, as `Order.at` does."""
        where = positions(start, stop, num_samples=self.num_samples)
        drawn = hashes(epoch_key(self.seed, self.epoch, purpose=_DRAWS), where)
        # Uniform in [0, 1): 53 bits, which float64 represents exactly.
        points = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self.sums[-1]
        found = np.searchsorted(self.sums, points, side="right")
        # If the product rounds up to the total, the last sample with a positive weight is drawn.
        last = int(np.searchsorted(self.sums, self.sums[-1], side="left"))
        return np.minimum(found, last).astype(np.int64)


# Specifications of orders.


BLOCK_BYTES = 4 << 20
"""Default size in bytes of a block of samples that are read together.

With blocks of this size, a disk with 8 ms per seek and 150 MB/s seeks for a quarter of the time.
"""


class OrderSpec(Protocol):
    """Interface of the argument `order` of `Loader`: makes the order of each epoch. Must be equal on every rank."""

    @property
    def name(self) -> str:
        """Name that identifies the order and all its parameters. A saved position is valid only for the same name."""

    def num_positions(self, *, num_samples: int) -> int:
        """Returns the number of positions per epoch.

        Args:
            num_samples: Number of samples of the dataset.
        """

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        """Returns the order of one epoch.

        Args:
            epoch: Number of the epoch, from 0.
            num_samples: Number of samples of the dataset.
            seed: Seed of the order; the same on every rank.

        Raises:
            DataError: If the order does not fit a dataset of `num_samples` samples.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffled:
    """All samples once per epoch, in another random order in each epoch."""

    @property
    def name(self) -> str:
        return ORDER_NAME

    def num_positions(self, *, num_samples: int) -> int:
        return num_samples

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        return EpochOrder(num_samples=num_samples, seed=seed, epoch=epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequential:
    """All samples once per epoch, in the order in which they are stored."""

    @property
    def name(self) -> str:
        return "sequential-1"

    def num_positions(self, *, num_samples: int) -> int:
        return num_samples

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        return EpochOrder(num_samples=num_samples, seed=seed, epoch=epoch, shuffle=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Blocks of consecutive samples in random order, with the samples mixed within a window of several blocks.

    This order is for storage on which reading consecutive samples is much faster than reading scattered samples. See
    `BlockOrder`.

    Attributes:
        block_samples: Number of samples per block.
        window_blocks: Number of blocks per window. The samples of a window are mixed.
    """

    block_samples: int
    window_blocks: int = 64

    @property
    def name(self) -> str:
        return f"blocks-1 of {self.block_samples} samples within {self.window_blocks}"

    def num_positions(self, *, num_samples: int) -> int:
        return num_samples

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        return BlockOrder(
            num_samples=num_samples, block_samples=self.block_samples, window_blocks=self.window_blocks,
            seed=seed, epoch=epoch,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted:
    """Samples drawn with replacement, with probabilities proportional to given weights.

    Keeps 8 bytes per sample in memory. Raises RecipeError if `num_draws` is below 1, and DataError if the weights
    are not valid.

    Attributes:
        weights: Weight of each sample: numbers, shape (number of samples of the dataset,), finite and not negative.
        num_draws: Number of samples drawn per epoch; None: as many as the dataset has samples.
        name: Name that identifies the order and its parameters.
    """

    weights: InitVar[NDArray[np.generic]]
    num_draws: int | None = None
    name: str = field(init=False)
    _sums: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self, weights: NDArray[np.generic]) -> None:
        if self.num_draws is not None and self.num_draws < 1:
            raise RecipeError(f"an epoch cannot have {self.num_draws} draws: at least 1 is needed")
        object.__setattr__(self, "_sums", cumulative_weights(weights))
        draws = "" if self.num_draws is None else f" {self.num_draws} draws"
        object.__setattr__(self, "name", f"weighted-1{draws} by {_content(self._sums)}")

    def num_positions(self, *, num_samples: int) -> int:
        return num_samples if self.num_draws is None else self.num_draws

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        _check_count("weights", found=len(self._sums), num_samples=num_samples)
        draws = self.num_positions(num_samples=num_samples)
        return WeightedOrder(sums=self._sums, num_samples=draws, seed=seed, epoch=epoch)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stratified:
    """All samples once per epoch. In each batch the classes have the same proportions as in the dataset.

    Keeps 4 bytes per sample in memory (8 from 2**32 samples on). Raises DataError if the classes are not valid.

    Attributes:
        classes: Class of each sample: integers or bool, shape (number of samples of the dataset,).
        name: Name that identifies the order and its parameters.
    """

    classes: InitVar[NDArray[np.generic]]
    name: str = field(init=False)
    _strata: Strata = field(init=False, repr=False)

    def __post_init__(self, classes: NDArray[np.generic]) -> None:
        object.__setattr__(self, "_strata", Strata.of(classes))
        content = _content(np.asarray(classes).astype("<i8"))
        object.__setattr__(self, "name", f"stratified-1 by {content}")

    def num_positions(self, *, num_samples: int) -> int:
        return num_samples

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        _check_count("strata", found=self._strata.num_samples, num_samples=num_samples)
        return StratifiedOrder(strata=self._strata, seed=seed, epoch=epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """The same order in every epoch, for held-out data: the order `of` for epoch 0 and seed 0.

    Attributes:
        of: Specification of the order that is used in every epoch.
    """

    of: OrderSpec

    @property
    def name(self) -> str:
        return f"fixed {self.of.name}"

    def num_positions(self, *, num_samples: int) -> int:
        return self.of.num_positions(num_samples=num_samples)

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        return _Renamed(order=self.of.for_epoch(0, num_samples=num_samples, seed=0), epoch=epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Renamed:
    """Wraps the order of an epoch, and gives it another epoch number. The samples are unchanged."""

    order: Order
    epoch: int

    @property
    def num_samples(self) -> int:
        return self.order.num_samples

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.order.at(start, stop)


def block_samples_for(sample_bytes: int) -> int:
    """Returns the number of samples in a block of about BLOCK_BYTES bytes, at least 1."""
    return max(1, BLOCK_BYTES // max(1, sample_bytes))


def _content(array: NDArray[np.generic]) -> str:
    return hash_of(np.ascontiguousarray(array).data)


def _check_count(what: str, *, found: int, num_samples: int) -> None:
    if found != num_samples:
        raise DataError(
            f"there are {found} {what} for a dataset of {num_samples} samples: one for each sample is needed, in the "
            "dataset's order"
        )
