"""How much longer the slowest of many ranks takes than one of them. Pure.

A step ends when its last rank does. Times of one rank vary by a lognormal factor of median 1; the expected largest of
N such factors follows from the quantile at Blom's plotting position (Blom 1958; David and Nagaraja, Order Statistics,
section 4.5), whose error is below 1 % from N = 2 on for sigma up to 0.3. For many ranks the largest is Gumbel
distributed, which gives its spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, median

from hpctrain.errors import UsageError

BLOM = 0.375
MAD_TO_SIGMA = 1.4826


def slowest_factor(sigma: float, count: int) -> float:
    """Returns the expected largest of `count` lognormal factors, divided by the mean of one.

    sigma: standard deviation of the factors' logarithm. Raises UsageError if it is negative.
    """
    if sigma < 0:
        raise UsageError(f"the spread of the ranks' times is {sigma}: give at least 0")
    if sigma == 0 or count <= 1:
        return 1.0
    quantile = NormalDist().inv_cdf((count - BLOM) / (count + 1 - 2 * BLOM))
    return math.exp(sigma * quantile - sigma * sigma / 2)


def slowest_spread(sigma: float, count: int) -> float:
    """Returns the standard deviation of the largest of `count` factors' logarithm: pi/sqrt(6) times Gumbel's scale."""
    if count <= 1:
        return sigma
    quantile = NormalDist().inv_cdf(1 - 1 / count) if count > 2 else 0.5
    return min(sigma, sigma / max(1.0, quantile) * math.pi / math.sqrt(6))


def spread_of_times(seconds: Sequence[float]) -> float:
    """Returns sigma of lognormal times, from the median absolute deviation of their logarithms; 0 for fewer than 3.

    Robust: a checkpoint or a pause in a few steps does not count as spread.
    """
    if len(seconds) < 3:
        return 0.0
    logs = [math.log(value) for value in seconds if value > 0]
    middle = median(logs)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in logs)
