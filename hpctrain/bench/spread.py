"""Median and spread of repeated measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median, quartiles, minimum and maximum of `count` samples, in the samples' unit."""

    median: float
    q1: float
    q3: float
    min: float
    max: float
    count: int

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def spread_of(samples: Sequence[float]) -> Spread:
    """Interpolates quantiles linearly between the sorted samples (numpy's default). Raises ValueError if empty."""
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
    """Median and quartiles, for example `12.1 (11.8-12.9)`; the value alone for a single sample."""
    if spread.count == 1:
        return show(spread.median)
    return f"{show(spread.median)} ({show(spread.q1)}-{show(spread.q3)})"


def show_number(value: float) -> str:
    """At least three significant digits, at most six decimals, no exponent: `0.0123`, `12.3`, `1,234`."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
