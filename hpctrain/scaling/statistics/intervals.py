"""Ratios of measured rates, with confidence intervals that are valid for few repeats.

Rates are compared by their logarithms. Noise multiplies a rate, so that logarithms are closer to a normal distribution;
and the interval of an inverse ratio is the inverse of the ratio's interval. The intervals are Student's t intervals.
The bootstrap is not used, since resampling three repeats can only return mixtures of the three values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, variance
from typing import Any

from scipy.special import stdtrit

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioEstimate:
    """A ratio with its two-sided confidence interval, dimensionless.

    Attributes:
        value: The geometric mean of the ratios.
        low: The lower bound at confidence `level`; None if there are too few repeats.
        high: The upper bound at confidence `level`; None if there are too few repeats.
        count: The number of repeats; if not paired, the number of repeats in the smaller group.
        paired: Whether numerator and denominator were measured in the same rounds.
        least: The smallest ratio of a round; None if not paired.
        greatest: The largest ratio of a round; None if not paired.
        range_level: The confidence with which `least` and `greatest` enclose the median ratio: 1 - 2^(1 - count),
            exact for every distribution; None if not paired.
    """

    value: float
    low: float | None
    high: float | None
    level: float
    count: int
    paired: bool
    least: float | None = None
    greatest: float | None = None
    range_level: float | None = None

    def scaled(self, factor: float) -> RatioEstimate:
        """Returns the estimate of the ratio times `factor`."""

        def times(value: float | None) -> float | None:
            return None if value is None else factor * value

        return replace(
            self, value=factor * self.value, low=times(self.low), high=times(self.high), least=times(self.least),
            greatest=times(self.greatest),
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, level: float = LEVEL
) -> RatioEstimate:
    """Returns the mean ratio of values measured in the same rounds. Element r of both sequences is from round r.

    Influences on a whole round (another user's job, a warm machine) cancel. The interval is Student's t interval of
    the logarithms of the ratios. Raises ValueError if the lengths differ or a value is not positive.
    """
    logs = [_log(a) - _log(b) for a, b in zip(numerators, denominators, strict=True)]
    if not logs:
        raise ValueError("no repeats")
    centre, half = fmean(logs), None
    if len(logs) > 1:
        half = quantile_of_t(level, len(logs) - 1) * math.sqrt(variance(logs) / len(logs))
    return RatioEstimate(
        value=math.exp(centre),
        low=None if half is None else math.exp(centre - half),
        high=None if half is None else math.exp(centre + half),
        level=level,
        count=len(logs),
        paired=True,
        least=math.exp(min(logs)),
        greatest=math.exp(max(logs)),
        range_level=1 - 2.0 ** (1 - len(logs)),
    )


def unpaired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, level: float = LEVEL
) -> RatioEstimate:
    """Returns the ratio of two groups of values that were not measured in the same rounds.

    The interval is Welch's t interval of the logarithms (Welch 1947, doi:10.1093/biomet/34.1-2.28), for which the
    variances of the groups may differ. Raises ValueError if a group is empty or a value is not positive.
    """
    top, bottom = [_log(a) for a in numerators], [_log(b) for b in denominators]
    if not top or not bottom:
        raise ValueError("no repeats")
    centre = fmean(top) - fmean(bottom)
    error = welch_error(top, bottom)
    half = None if error is None else quantile_of_t(level, error[1]) * error[0]
    return RatioEstimate(
        value=math.exp(centre),
        low=None if half is None else math.exp(centre - half),
        high=None if half is None else math.exp(centre + half),
        level=level,
        count=min(len(top), len(bottom)),
        paired=False,
    )


def welch_error(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Returns the standard error of the difference of two means, and the degrees of freedom of this error.

    Returns None if a group has fewer than two values.
    """
    if len(first) < 2 or len(second) < 2:
        return None
    parts = [variance(group) / len(group) for group in (first, second)]
    if sum(parts) == 0:
        return 0.0, float(len(first) + len(second) - 2)
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(group) - 1) for part, group in zip(parts, (first, second), strict=True)
    )
    return math.sqrt(sum(parts)), freedom


def quantile_of_t(level: float, freedom: float) -> float:
    """Returns the t for which a value of Student's t distribution is between -t and t with probability `level`.

    freedom: the degrees of freedom of the distribution.
    """
    return float(stdtrit(freedom, 0.5 + level / 2))


def _log(value: float) -> float:
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{value} is not a positive number, so it has no ratio to another")
    return math.log(value)
