"""Mean, standard deviation, minimum and maximum of a field, accumulated shard by shard in float64.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
Stanford STAN-CS-79-773, 1979. Blocks are added in the order of the samples, shards in the order of the
dataset: the result does not depend on the number of ranks that packed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.format.manifest_entries import FieldStatistics

# Small enough for the float64 copy of a block to stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Moments of `count` finite elements. squares: sum of (element - mean)^2. low, high: only valid if count > 0."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def __add__(self, other: Moments) -> Moments:
        if not other.count or not self.count:
            return self if self.count else other
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * (other.count / count),
            squares=self.squares + other.squares + delta * delta * (self.count * (other.count / count)),
            low=min(self.low, other.low),
            high=max(self.high, other.high),
        )

    def as_json(self) -> dict[str, float | int]:
        """Returns JSON values; {} if there are no elements, since JSON has no infinity."""
        return asdict(self) if self.count else {}

    def statistics(self) -> FieldStatistics | None:
        """Returns the manifest's statistics; None without finite elements, or if float64 overflowed."""
        if not self.count or not math.isfinite(self.squares) or not math.isfinite(self.mean):
            return None
        return FieldStatistics(
            mean=self.mean,
            std=math.sqrt(self.squares / self.count),
            min=self.low,
            max=self.high,
            count=self.count,
        )


def moments_of(array: NDArray[Any]) -> Moments:
    """Returns the moments of all finite elements of an array of any shape; bool counts as 0 and 1."""
    flat = array.reshape(-1)
    if flat.dtype == np.uint8:
        return _of_bytes(flat)
    total = Moments()
    for start in range(0, len(flat), _BLOCK_ELEMENTS):
        total += _of_block(flat[start : start + _BLOCK_ELEMENTS])
    return total


def _of_block(block: NDArray[Any]) -> Moments:
    with np.errstate(invalid="ignore"):  # signaling NaN
        values = block.astype(np.float64)
    if block.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            values = values[finite]
    if not len(values):
        return Moments()
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(values.mean())
        low, high = float(values.min()), float(values.max())
        values -= mean
        squares = float(np.dot(values, values))
    return Moments(count=len(values), mean=mean, squares=squares, low=low, high=high)


def _of_bytes(flat: NDArray[np.uint8]) -> Moments:
    """Returns exact moments, from a histogram of the 256 values."""
    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, len(flat), _BLOCK_ELEMENTS):
        counts += np.bincount(flat[start : start + _BLOCK_ELEMENTS], minlength=256)
    if not len(flat):
        return Moments()
    present = np.flatnonzero(counts)
    mean = float(np.dot(np.arange(256), counts)) / len(flat)
    squares = float(np.dot((np.arange(256) - mean) ** 2, counts))
    return Moments(
        count=len(flat), mean=mean, squares=squares, low=float(present[0]), high=float(present[-1])
    )


def statistics_of(parts: Iterable[Mapping[str, Moments]]) -> dict[str, FieldStatistics]:
    """Returns field -> statistics over consecutive parts (field -> moments)."""
    totals: dict[str, Moments] = {}
    for part in parts:
        for name, moments in part.items():
            totals[name] = totals.get(name, Moments()) + moments
    found = {name: moments.statistics() for name, moments in totals.items()}
    return {name: statistics for name, statistics in found.items() if statistics is not None}
