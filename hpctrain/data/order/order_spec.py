"""Specifications of orders: each makes the order of every epoch, and has a name that checkpoints record."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.block_shuffle import BlockOrder
from hpctrain.data.order.epoch_order import ORDER_NAME, EpochOrder, Order
from hpctrain.data.order.stratified import Strata, StratifiedOrder
from hpctrain.data.order.weighted import WeightedOrder, cumulative_weights
from hpctrain.errors import DataError, RecipeError
from hpctrain.storage import hash_of

BLOCK_BYTES = 4 << 20
"""Default size of a block: a disk with 8 ms per seek and 150 MB/s then spends a quarter of the time seeking."""


class OrderSpec(Protocol):
    """Interface of the argument of `Loader(order=...)`. It must be equal on every rank."""

    @property
    def name(self) -> str:
        """Name that identifies the order with all its parameters, since positions are valid for one order only."""

    def num_positions(self, *, num_samples: int) -> int:
        """Returns the length of an epoch over a dataset of `num_samples` samples."""

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        """Returns the order of an epoch. Raises DataError if it does not fit a dataset of `num_samples` samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffled:
    """All samples, in another random order each epoch."""

    @property
    def name(self) -> str:
        return ORDER_NAME

    def num_positions(self, *, num_samples: int) -> int:
        return num_samples

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        return EpochOrder(num_samples=num_samples, seed=seed, epoch=epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequential:
    """All samples in the order in which they are stored."""

    @property
    def name(self) -> str:
        return "sequential-1"

    def num_positions(self, *, num_samples: int) -> int:
        return num_samples

    def for_epoch(self, epoch: int, *, num_samples: int, seed: int) -> Order:
        return EpochOrder(num_samples=num_samples, seed=seed, epoch=epoch, shuffle=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Blocks of consecutive samples in random order, mixed within a window of blocks. See `BlockOrder`."""

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
    """Samples drawn with replacement. weights: numbers, shape (samples in the dataset,), not negative.

    num_draws: length of an epoch; None: the number of samples. Keeps 8 bytes per sample in memory.
    Raises RecipeError if `num_draws` is below 1, DataError if the weights are not valid.
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
    """All samples, with the classes in the dataset's proportions in each batch.

    classes: integers or bool, shape (samples in the dataset,). Keeps 4 bytes per sample in memory (8 from 2**32
    samples on). Raises DataError for other arrays.
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
    """Uses the order of epoch 0 and seed 0 of another specification in every epoch. For held-out data."""

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
    """An order with another epoch number."""

    order: Order
    epoch: int

    @property
    def num_samples(self) -> int:
        return self.order.num_samples

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.order.at(start, stop)


def block_samples_for(sample_bytes: int) -> int:
    """Returns the number of samples of a block of about BLOCK_BYTES, at least 1."""
    return max(1, BLOCK_BYTES // max(1, sample_bytes))


def _content(array: NDArray[np.generic]) -> str:
    return hash_of(np.ascontiguousarray(array).data)


def _check_count(what: str, *, found: int, num_samples: int) -> None:
    if found != num_samples:
        raise DataError(
            f"there are {found} {what} for a dataset of {num_samples} samples: one for each sample is needed, in the "
            "dataset's order"
        )
