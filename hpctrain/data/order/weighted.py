"""Draws samples with replacement, with probabilities proportional to their weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order.epoch_order import check_order, positions
from hpctrain.data.order.permutation import epoch_key, hashes
from hpctrain.errors import DataError

_DRAWS = 3  # purpose of the key


def cumulative_weights(weights: NDArray[np.generic]) -> NDArray[np.float64]:
    """Returns the cumulative sums of weights, float64, shape (n,), for `WeightedOrder`.

    weights: numbers, shape (n,). Raises DataError if they are negative, not finite, or all zero.
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
    """Each position of an epoch is a sample drawn with replacement, independent of the other positions.

    sums: from `cumulative_weights`, shape (samples in the dataset,). num_samples: draws in an epoch. Each position
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
        # Uniform in [0, 1): 53 bits, which float64 represents exactly.
        points = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self.sums[-1]
        found = np.searchsorted(self.sums, points, side="right")
        # If the product rounds up to the total, the last sample with a positive weight is drawn.
        last = int(np.searchsorted(self.sums, self.sums[-1], side="left"))
        return np.minimum(found, last).astype(np.int64)
