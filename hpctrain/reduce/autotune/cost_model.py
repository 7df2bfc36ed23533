"""What a reduction costs by its size, from a few measurements. Pure.

The usual model of a message, a latency and a time per byte (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9), holds
within a range of sizes only: libraries change their protocol with the size, caches end. So it is piecewise:
straight lines between the sizes that were measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.errors import UsageError

# Of the time of the largest size measured, what at least counts as time of its bytes.
LEAST_SHARE_OF_BYTES = 0.1


class Candidate(NamedTuple):
    """A way to reduce, by the names of the recipe."""

    algorithm: str
    wire: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One reduction of `num_bytes` of uncast gradients took `seconds`, on the rank that took longest."""

    algorithm: str
    wire: str
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.num_bytes < 1 or not 0 < self.seconds < float("inf"):
            raise UsageError(
                f"a measurement of {self.algorithm} with {self.wire} says {self.seconds} s for {self.num_bytes} bytes: "
                "both must be above 0"
            )

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.algorithm, self.wire)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by size: straight lines through `points`, (bytes, seconds) with both ascending.

    latency_s: at size 0. slope: seconds per byte beyond the last point.
    """

    points: tuple[tuple[int, float], ...]
    latency_s: float
    slope: float

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, float]]) -> Cost:
        """From (bytes, seconds), at least one; of several of one size the least counts.

        Noise only ever adds, so where a larger size took less time, the smaller one is taken to cost no more.
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
        # Of one size alone nothing says what of it is latency: beyond it, all of it counts as bytes. Where noise
        # made sizes look level, larger ones must not be free.
        slope = last[1] / last[0]
        latency = first[1]
        if len(points) > 1:
            slope = max(_slope(points[-2], last), _slope(first, last), LEAST_SHARE_OF_BYTES * slope)
            latency = max(0.0, first[1] - first[0] * _slope(first, points[1]))
        return cls(tuple(points), latency, slope)

    def at(self, num_bytes: float) -> float:
        """Seconds for a bucket of `num_bytes`; never less for a larger one."""
        place = bisect_right(self.points, num_bytes, key=lambda point: point[0])
        if place == len(self.points):
            last_bytes, last_s = self.points[-1]
            return last_s + (num_bytes - last_bytes) * self.slope
        low_bytes, low_s = self.points[place - 1] if place else (0, self.latency_s)
        high_bytes, high_s = self.points[place]
        share = (num_bytes - low_bytes) / (high_bytes - low_bytes)
        return min(high_s, low_s + share * (high_s - low_s))

    def crossings(self, other: Cost) -> list[float]:
        """Sizes at which one of the two begins to cost more than the other."""
        knots = sorted({0, *(p[0] for p in self.points), *(p[0] for p in other.points)})
        found = []
        for low, high in zip(knots, [*knots[1:], None], strict=True):
            before = self.at(low) - other.at(low)
            # Beyond the last knot both are straight for ever: any second size tells how they go on.
            end = 2 * low + 1 if high is None else high
            after = self.at(end) - other.at(end)
            if before * after < 0 or (high is None and before * (after - before) < 0):
                found.append(low + (end - low) * before / (before - after))
        return found


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])
