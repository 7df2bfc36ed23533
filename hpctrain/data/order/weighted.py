"""Drawing samples with replacement, each as often as its weight says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import check_order, positions
from hpctrain.data.order.permutation import epoch_key, hashes
from hpctrain.errors import DataError

_DRAWS = 3  # purpose of the key


def cumulative_weights(weights: NDArray[np.generic]) -> NDArray[np.float64]:
    """Running sums of weights, shape (n,): what `WeightedOrder` draws from. 8 bytes a sample are kept.

    Raises DataError for weights that are negative, not finite, or all zero.
    """
    values = np.asarray(weights)
    if values.ndim != 1 or values.dtype.kind not in "biuf":
        raise DataError(
            f"weights are {values.dtype.name} of shape {values.shape}: one number a sample is needed"
        )
    faulty = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(faulty):
        raise DataError(
            f"the weight of sample {faulty[0]} is {values[faulty[0]]}: weights are finite and not negative"
        )
    # cumsum adds from first to last, so every machine gets the same sums.
    sums = np.cumsum(values, dtype=np.float64)
    if not len(sums) or not 0 < sums[-1] < np.inf:
        raise DataError(f"the weights add up to {sums[-1] if len(sums) else 0}: nothing can be drawn by them")
    return sums


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightedOrder:
    """Position p of an epoch holds a sample drawn with replacement; independent of every other position.

    sums: of `cumulative_weights`, shape (samples in the dataset,). num_samples: draws in an epoch. A position
    costs one binary search. A sample of weight 0 is never drawn.
    """

    sums: NDArray[np.float64]
    num_samples: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_order(num_samples=self.num_samples, seed=self.seed, epoch=self.epoch)

    def at(self, start: int, stop: int) -> NDArray[np.int64]:
        """See `Order.at`."""
        where = positions(start, stop, num_samples=self.num_samples)
        drawn = hashes(epoch_key(self.seed, self.epoch, purpose=_DRAWS), where)
        # 53 bits: what a float64 holds exactly, in [0, 1).
        points = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self.sums[-1]
        found = np.searchsorted(self.sums, points, side="right")
        # The product may round up to the whole sum: that is the last sample with a weight.
        last = int(np.searchsorted(self.sums, self.sums[-1], side="left"))
        return np.minimum(found, last).astype(np.int64)
