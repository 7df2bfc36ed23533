"""The interval between checkpoints that loses the least time, in closed form. Pure.

Sources: Young 1974, doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016, equation 37.
"""

from __future__ import annotations

import math

from hpctrain.errors import UsageError


def young_interval(save_s: float, *, between_failures_s: float) -> float:
    """Returns sqrt(2 s M): the seconds of training between two saves that take `save_s` each."""
    _check(save_s, between_failures_s)
    return math.sqrt(2 * save_s * between_failures_s)


def daly_interval(save_s: float, *, between_failures_s: float) -> float:
    """Returns Daly's estimate of higher order, better where failures come every few saves."""
    _check(save_s, between_failures_s)
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = math.sqrt(save_s / (2 * between_failures_s))
    return (
        young_interval(save_s, between_failures_s=between_failures_s) * (1 + ratio / 3 + ratio**2 / 9)
        - save_s
    )


def expected_share(interval_s: float, save_s: float, *, restart_s: float, between_failures_s: float) -> float:
    """Returns the share of time that trains, for exponential failures: Daly 2006, equation 20."""
    _check(save_s, between_failures_s)
    mean = between_failures_s
    wall = mean * math.exp(restart_s / mean) * (math.exp((interval_s + save_s) / mean) - 1)
    return interval_s / wall


def _check(save_s: float, between_failures_s: float) -> None:
    if not save_s > 0 or not between_failures_s > 0:
        raise UsageError(
            f"a save of {save_s} s and {between_failures_s} s between failures: both must be above 0"
        )
