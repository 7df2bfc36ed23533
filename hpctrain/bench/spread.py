"""Median and spread of repeated measurements. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Of `count` samples: the middle, the quartiles, the ends. All in the samples' unit."""

    median: float
    q1: float
    q3: float
    min: float
    max: float
    count: int

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def spread_of(samples: Sequence[float]) -> Spread:
    """Quantiles by linear interpolation between the sorted samples (numpy's default). ValueError if empty."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return Spread(
        median=_quantile(ordered, 0.5),
        q1=_quantile(ordered, 0.25),
        q3=_quantile(ordered, 0.75),
        min=ordered[0],
        max=ordered[-1],
        count=len(ordered),
    )


def describe_spread(spread: Spread, show: Callable[[float], str]) -> str:
    """`12.1 (11.8-12.9)`: the median, and between which values the middle half of the samples is."""
    if spread.count == 1:
        return show(spread.median)
    return f"{show(spread.median)} ({show(spread.q1)}-{show(spread.q3)})"


def show_number(value: float) -> str:
    """Three significant digits at least, no exponent: `0.0123`, `12.3`, `1,234`."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
