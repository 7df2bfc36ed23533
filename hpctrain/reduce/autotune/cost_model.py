"""Cost of a reduction by size, from a few measurements. Pure.

The usual model of a message, a latency and a time per byte (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9), is valid
within a range of sizes only: libraries change their protocol with the size, and caches are limited. So the model is
piecewise linear between the measured sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.errors import UsageError

# Minimum share of the largest measured size's time that is attributed to its bytes.
LEAST_SHARE_OF_BYTES = 0.1


class Candidate(NamedTuple):
    """An algorithm and a wire format, by their names in the recipe."""

    algorithm: str
    wire: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Time of one reduction of `num_bytes` of gradients (before the cast to the wire), on the slowest rank."""

    algorithm: str
    wire: str
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or not 0 < self.seconds < float("inf"):
            raise UsageError(
                f"a measurement of {self.algorithm} with {self.wire} has {self.seconds} s for {self.num_bytes} bytes: "
                "both must be above 0"
            )

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.algorithm, self.wire)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by size: piecewise linear through `points`, (bytes, seconds), both ascending.

    latency_s: at size 0. slope: seconds per byte beyond the last point.
    """

    points: tuple[tuple[int, float], ...]
    latency_s: float
    slope: float

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, float]]) -> Cost:
        """Fits a cost to (bytes, seconds). Of several times of one size the lowest is used. UsageError if empty.

        Noise only adds time, so if a larger size took less time, that time also limits the smaller one's.
        """
        least: dict[int, float] = {}
        for num_bytes, seconds in measured:
            least[num_bytes] = min(seconds, least.get(num_bytes, seconds))
        if not least:
            raise UsageError("no measurement to fit a cost to: give at least one")
        points: list[tuple[int, float]] = []
        for num_bytes in sorted(least, reverse=True):
            points.append((num_bytes, min(least[num_bytes], points[-1][1] if points else least[num_bytes])))
        points.reverse()
        first, last = points[0], points[-1]
        # With one size the share of latency is unknown: beyond it, all time is attributed to bytes. If noise made the
        # curve flat, a minimum slope ensures that larger sizes are not free.
        slope = last[1] / last[0]
        latency = first[1]
        if len(points) > 1:
            slope = max(_slope(points[-2], last), _slope(first, last), LEAST_SHARE_OF_BYTES * slope)
            latency = max(0.0, first[1] - first[0] * _slope(first, points[1]))
        return cls(tuple(points), latency, slope)

    def at(self, num_bytes: float) -> float:
        """Returns the seconds for a bucket of `num_bytes`; never decreases with the size."""
        place = bisect_right(self.points, num_bytes, key=lambda point: point[0])
        if place == len(self.points):
            last_bytes, last_s = self.points[-1]
            return last_s + (num_bytes - last_bytes) * self.slope
        low_bytes, low_s = self.points[place - 1] if place else (0, self.latency_s)
        high_bytes, high_s = self.points[place]
        share = (num_bytes - low_bytes) / (high_bytes - low_bytes)
        return min(high_s, low_s + share * (high_s - low_s))

    def crossings(self, other: Cost) -> list[float]:
        """Returns the sizes at which the two costs cross."""
        knots = sorted({0, *(p[0] for p in self.points), *(p[0] for p in other.points)})
        found = []
        for low, high in zip(knots, [*knots[1:], None], strict=True):
            before = self.at(low) - other.at(low)
            # Beyond the last knot both are linear: any second size determines the slopes.
            end = 2 * low + 1 if high is None else high
            after = self.at(end) - other.at(end)
            if before * after < 0 or (high is None and before * (after - before) < 0):
                found.append(low + (end - low) * before / (before - after))
        return found


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])
