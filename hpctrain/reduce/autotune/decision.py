"""Choice of the reduction for each bucket size, from measurements. Pure.

For each size the candidate with the lowest fitted cost is chosen; of equal ones, the first measured. A candidate that
was dropped before the larger sizes were measured is not chosen for those.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.reduce.autotune.link_speed import Candidate, Cost, LinkFloor, Measurement
from hpctrain.reduce.wire_formats import roundings

DEFAULT_BUCKET_BYTES = 4_000_000
SMALLEST_BUCKET_BYTES = 1 << 19
LARGEST_BUCKET_BYTES = 1 << 25
# Share of the best rate of any bucket size that a bucket must reach. If only latency lowers the rate, 8/9 is reached at
# 8 times Hockney's half-performance length, the size whose bytes take as long as its latency.
EFFICIENCY = 8 / 9
# Minimum number of buckets of a model, so that most of the reduction overlaps with backward; the last one never does
# (Li et al. 2020, arXiv:2006.15704: small buckets pay latency, large ones do not overlap).
LEAST_BUCKETS = 4
# Bytes of a bucket for flags and gaps, in addition to gradients, so that one bucket for all gradients does not become
# two.
OTHER_BUCKET_BYTES = 1 << 16
# A wire format that rounds more must save at least this share of the time, since few trials of small sizes have errors
# of more than a few percent. If the link limits the rate, a smaller saving is enough.
WORTH_ROUNDING = 0.2
WORTH_ROUNDING_ON_LINKS = 0.05
# Share of the measured time that is added to the floor, which decides between candidates with equal floors.
MEASURED_SHARE = 0.01
# The link counts as the limit if its bytes take at least this share of the measured time.
DECIDED_BY_LINK = 0.5
# No bucket is larger, so larger sizes are not compared.
LARGEST_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class Range:
    """A range of sizes: `candidate` is used from `begin` bytes up to the next range."""

    begin: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates by bucket size. Created by `of_measurements`, or by `only` if there is one candidate.

    costs: fitted cost of each candidate; empty if nothing was measured.
    ranges: chosen candidates, from the smallest sizes up.
    measurements: times from which the costs were fitted.
    floor: lower bound by the links between nodes; None if unknown.
    """

    costs: Mapping[Candidate, Cost]
    ranges: tuple[Range, ...]
    measurements: tuple[Measurement, ...] = ()
    floor: LinkFloor | None = None

    @classmethod
    def only(cls, candidate: Candidate) -> Choice:
        """Returns the choice of the only candidate, without measurements."""
        return cls({}, (Range(0, candidate),))

    @classmethod
    def of_measurements(
        cls, measurements: Sequence[Measurement], *, floor: LinkFloor | None = None
    ) -> Choice:
        """Makes the choice from measurements. Raises UsageError if there are none.

        floor: lower bound by the links between nodes; shorter times are raised to it.
        """
        if not measurements:
            raise UsageError("no measurements to choose by: give at least one of a candidate")
        costs = {candidate: Cost.fit(points) for candidate, points in _by_candidate(measurements).items()}
        if floor is not None:
            costs = {c: _floored(cost, floor.seconds_per_byte(c)) for c, cost in costs.items()}
        return cls(costs, _ranges(costs), tuple(measurements), floor)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates that are chosen for any size, in order of size."""
        return tuple(dict.fromkeys(r.candidate for r in self.ranges))

    def choose(self, num_bytes: int) -> Candidate:
        """Returns the candidate for a bucket with `num_bytes` of gradients, before the cast to the wire format."""
        place = bisect_right(self.ranges, num_bytes, key=lambda entry: entry.begin)
        return self.ranges[max(0, place - 1)].candidate

    def seconds(self, num_bytes: int) -> float:
        """Returns the predicted time of the chosen candidate, in seconds; 0 if nothing was measured."""
        return self.costs[self.choose(num_bytes)].at(num_bytes) if self.costs else 0.0

    def for_wire(self, wire: str) -> Choice:
        """Returns the choice among the candidates with this wire format. Raises UsageError if there is none."""
        if not self.costs:
            if self.ranges[0].candidate.wire == wire:
                return self
            raise UsageError(f"nothing was measured with the wire {wire}")
        mine = [m for m in self.measurements if m.wire == wire]
        return Choice.of_measurements(mine, floor=self.floor)

    def for_all_sizes(self, bucket_bytes: Iterable[int]) -> Choice:
        """Returns the choice of a single candidate for all sizes: the fastest for these buckets in total."""
        if not self.costs:
            return self
        sizes = list(bucket_bytes)
        among = eligible(self.costs, max(sizes, default=0))
        best = min(among, key=lambda candidate: sum(self.costs[candidate].at(size) for size in sizes))
        return Choice(self.costs, (Range(0, best),), self.measurements, self.floor)

    def fastest_wire(self, bucket_bytes: Iterable[int]) -> str:
        """Returns the fastest wire format for these buckets.

        One that rounds more is chosen only if it saves enough time. A wire format that was not measured up to the
        largest bucket is not chosen: measured times may include a busy moment, and extrapolated times never do, so
        they would be preferred wrongly.
        """
        sizes = list(bucket_bytes)
        among = eligible(self.costs, max(sizes, default=0)) if self.costs else self.candidates
        ordered = sorted(dict.fromkeys(c.wire for c in among), key=roundings)
        chosen = ordered[0]
        if not self.costs:
            return chosen
        chosen_s = self._total_s(chosen, sizes)
        worth = WORTH_ROUNDING_ON_LINKS if self._decided_by_link(chosen, sizes) else WORTH_ROUNDING
        for wire in ordered[1:]:
            seconds = self._total_s(wire, sizes)
            if seconds < (1 - worth) * chosen_s:
                chosen, chosen_s = wire, seconds
        return chosen

    def _decided_by_link(self, wire: str, sizes: Sequence[int]) -> bool:
        if self.floor is None:
            return False
        choice = self.for_wire(wire)
        link_s = sum(size * self.floor.seconds_per_byte(choice.choose(size)) for size in sizes)
        return link_s >= DECIDED_BY_LINK * sum(choice.seconds(size) for size in sizes)

    def _total_s(self, wire: str, sizes: Sequence[int]) -> float:
        choice = self.for_wire(wire)
        return sum(choice.seconds(size) for size in sizes)

    def bucket_bytes(self, *, gradient_bytes: int, overlap: bool = True) -> int:
        """Returns a bucket size at which latency is a small share of the time, but the model has several buckets.

        It is the smallest power of two whose predicted rate (bytes per second) is 8/9 of the best, at most a quarter
        of `gradient_bytes`, and between 512 KiB and 32 MiB. Without `overlap` it is one bucket for all gradients, up
        to 32 MiB.

        gradient_bytes: size of all gradients of the model.
        """
        if not overlap:
            return max(SMALLEST_BUCKET_BYTES, min(gradient_bytes + OTHER_BUCKET_BYTES, LARGEST_BUCKET_BYTES))
        size = DEFAULT_BUCKET_BYTES
        if self.costs:
            sizes = [SMALLEST_BUCKET_BYTES]
            while sizes[-1] < LARGEST_BUCKET_BYTES:
                sizes.append(2 * sizes[-1])
            rates = [n / self.seconds(n) for n in sizes]
            size = next(n for n, rate in zip(sizes, rates, strict=True) if rate >= EFFICIENCY * max(rates))
        quarter = math.ceil(gradient_bytes / LEAST_BUCKETS)
        return max(SMALLEST_BUCKET_BYTES, min(size, quarter))

    def ranges_to_json(self) -> list[dict[str, Any]]:
        return [{"from_bytes": r.begin, **r.candidate._asdict()} for r in self.ranges]

    @classmethod
    def from_ranges(cls, value: Any) -> Choice:
        """Restores what `ranges_to_json` returned, without costs. Raises ValueError for anything else."""
        try:
            ranges = tuple(
                Range(int(v["from_bytes"]), Candidate(str(v["algorithm"]), str(v["wire"]))) for v in value
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a list of ranges: {error}") from error
        if not ranges or [r.begin for r in ranges] != sorted({0, *(r.begin for r in ranges)}):
            raise ValueError("not a list of ranges: from_bytes must be 0 in the first and then ascend")
        return cls({}, ranges)

    def describe(self) -> str:
        """Returns a text such as `flat up to 64 KB, then hierarchical-ring`."""
        parts = []
        for this, following in zip(self.ranges, self.ranges[1:], strict=False):
            parts.append(f"{this.candidate.algorithm} up to {_show_bytes(following.begin)}")
        return ", then ".join([*parts, self.ranges[-1].candidate.algorithm])

    def record(self) -> dict[str, Any]:
        """Returns the chosen ranges and each candidate's measurements as JSON values, for the run's record.

        `floor_seconds_per_byte` is the lower bound of the time per byte in comparisons of candidates; 0 if there is
        none.
        """
        candidates = []
        for candidate, points in _by_candidate(self.measurements).items():
            cost = Cost.fit(points)
            candidates.append({
                **candidate._asdict(), "latency_s": cost.latency_s, "seconds_per_byte": cost.slope,
                "floor_seconds_per_byte": self.floor.seconds_per_byte(candidate) if self.floor else 0.0,
                "measured": [{"bytes": size, "seconds": seconds} for size, seconds in points],
            })  # fmt: skip
        return {"ranges": self.ranges_to_json(), "candidates": candidates}


def measurements_to_json(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    return [asdict(m) for m in measurements]


def measurements_from_json(value: Any) -> list[Measurement]:
    """Restores what `measurements_to_json` returned. Raises ValueError for anything else."""
    try:
        found = [
            Measurement(
                algorithm=str(m["algorithm"]), wire=str(m["wire"]), num_bytes=int(m["num_bytes"]),
                seconds=float(m["seconds"]),
            )
            for m in value
        ]  # fmt: skip
    except (TypeError, KeyError, UsageError) as error:
        raise ValueError(f"no measurements: {error}") from error
    if not found:
        raise ValueError("no measurements: the list is empty")
    return found


def eligible(costs: Mapping[Candidate, Cost], num_bytes: float) -> list[Candidate]:
    """Returns the candidates measured up to `num_bytes`, or up to the largest measured size if that is smaller."""
    furthest = max(cost.points[-1][0] for cost in costs.values())
    return [c for c, cost in costs.items() if cost.points[-1][0] >= min(num_bytes, furthest)]


def _floored(cost: Cost, least: float) -> Cost:
    """Returns `cost` raised to at least `least` seconds per byte; a share of the measured time decides ties.

    If the bound explains most of the time of the largest size, it is also the slope beyond that size: the difference
    of two trials is less reliable, since either may include a busy moment.
    """
    sizes = [n for n, _ in cost.points]
    for (low, low_s), (high, high_s) in pairwise(cost.points):
        over, under = low_s - low * least, high * least - high_s
        if over * under > 0:  # cost and floor cross between the two sizes: add the crossing
            sizes.append(low + round((high - low) * over / (over + under)))
    measured = [(n, cost.at(n)) for n in sizes]
    floored = Cost.fit((n, max(s, n * least) + MEASURED_SHARE * s) for n, s in measured)
    last_bytes, last_s = cost.points[-1]
    decided = last_bytes * least >= DECIDED_BY_LINK * last_s
    return replace(floored, slope=least if decided else max(floored.slope, least))


def _by_candidate(measurements: Iterable[Measurement]) -> dict[Candidate, list[tuple[int, float]]]:
    """Returns (bytes, seconds) of each candidate's measurements."""
    found: dict[Candidate, list[tuple[int, float]]] = {}
    for m in measurements:
        found.setdefault(m.candidate, []).append((m.num_bytes, m.seconds))
    return found


def _ranges(costs: Mapping[Candidate, Cost]) -> tuple[Range, ...]:
    """Returns the best candidate by size.

    It changes only near crossings of costs and at measured sizes, so only these sizes are tried.
    """
    sizes = {0}
    fitted = list(costs.values())
    for place, one in enumerate(fitted):
        for other in fitted[place + 1 :]:
            for crossing in one.crossings(other):
                if crossing <= LARGEST_SIZE:
                    sizes.update(range(max(0, math.floor(crossing) - 1), math.floor(crossing) + 3))
        sizes.update(size for size, _ in one.points)  # costs may be equal up to there and differ beyond
        sizes.update(size + 1 for size, _ in one.points)
    ranges: list[Range] = []
    for size in sorted(sizes):
        best = min(eligible(costs, size), key=lambda candidate: costs[candidate].at(size))
        if not ranges or ranges[-1].candidate != best:
            ranges.append(Range(size, best))
    return tuple(ranges)


def _show_bytes(num_bytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} bytes"
