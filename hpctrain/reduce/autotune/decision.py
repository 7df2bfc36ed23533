"""Which reduction for which size, from measurements. Pure.

The choice for a size is the candidate whose fitted cost is least there; of equals the first one measured. Where
others were measured at larger sizes than a candidate, it was left behind: it is not chosen for those.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.reduce.autotune.cost_model import Candidate, Cost, Measurement
from hpctrain.reduce.autotune.link_bound import LinkFloor

DEFAULT_BUCKET_BYTES = 4_000_000
SMALLEST_BUCKET_BYTES = 1 << 19
LARGEST_BUCKET_BYTES = 1 << 25
# Of the best rate that any bucket reaches. Where nothing but latency lowers it, 8/9 is reached at 8 times Hockney's
# half-performance length, the size whose bytes take as long as its latency.
EFFICIENCY = 8 / 9
# So many buckets of a model at least, so that most of the reduction has backward to hide behind; the last one never
# has (Li et al. 2020, arXiv:2006.15704: small buckets pay latency, large ones do not overlap).
LEAST_BUCKETS = 4
# A bucket holds more than gradients: a flag a parameter, and gaps that align them. So much room for these, so that
# one bucket meant for all gradients does not become two.
BESIDE_GRADIENTS = 1 << 16
# A wire that rounds more must save at least this share of the time: few trials of small sizes err by more than a few
# percent. Where a link decides, whose bytes it halves, little is enough.
WORTH_ROUNDING = 0.2
WORTH_ROUNDING_ON_LINKS = 0.05
# Of candidates whose bytes decide alike, the one that was faster: so much of the measured time counts beside the floor.
MEASURED_BESIDE_FLOOR = 0.01
# The link decides where its bytes are at least this share of what was measured.
DECIDED_BY_LINK = 0.5
EXACTNESS = ("fp32", "fp16", "bf16")
# No bucket is larger: what would be better there is of no interest.
LARGEST_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class Range:
    """`candidate` for sizes of at least `begin` bytes, up to the next range."""

    begin: int
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Choice:
    """What to reduce with, by size. Made by `of_measurements`, or by `only` where there is no choice."""

    costs: Mapping[Candidate, Cost]
    ranges: tuple[Range, ...]
    measurements: tuple[Measurement, ...] = ()
    floor: LinkFloor | None = None

    @classmethod
    def only(cls, candidate: Candidate) -> Choice:
        """Nothing was measured, as there is one candidate."""
        return cls({}, (Range(0, candidate),))

    @classmethod
    def of_measurements(
        cls, measurements: Sequence[Measurement], *, floor: LinkFloor | None = None
    ) -> Choice:
        """UsageError if there are none. floor: of the links between nodes; no time below it counts."""
        if not measurements:
            raise UsageError("no measurements to choose by: give at least one of a candidate")
        costs = {candidate: Cost.fit(points) for candidate, points in _by_candidate(measurements).items()}
        if floor is not None:
            costs = {c: _floored(cost, floor.seconds_per_byte(c)) for c, cost in costs.items()}
        return cls(costs, _ranges(costs), tuple(measurements), floor)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that are chosen for some size, smallest size first."""
        return tuple(dict.fromkeys(r.candidate for r in self.ranges))

    def choose(self, num_bytes: int) -> Candidate:
        """For a bucket of so many bytes of uncast gradients."""
        place = bisect_right(self.ranges, num_bytes, key=lambda entry: entry.begin)
        return self.ranges[max(0, place - 1)].candidate

    def seconds(self, num_bytes: int) -> float:
        """Predicted for the candidate that is chosen; 0 where nothing was measured."""
        return self.costs[self.choose(num_bytes)].at(num_bytes) if self.costs else 0.0

    def for_wire(self, wire: str) -> Choice:
        """The same, among the candidates with this wire. UsageError if none has it."""
        if not self.costs:
            if self.ranges[0].candidate.wire == wire:
                return self
            raise UsageError(f"nothing was measured with the wire {wire}")
        mine = [m for m in self.measurements if m.wire == wire]
        return Choice.of_measurements(mine, floor=self.floor)

    def for_all_sizes(self, bucket_bytes: Iterable[int]) -> Choice:
        """One candidate, whatever the size: the one that takes least time for these buckets together."""
        if not self.costs:
            return self
        sizes = list(bucket_bytes)
        among = eligible(self.costs, max(sizes, default=0))
        best = min(among, key=lambda candidate: sum(self.costs[candidate].at(size) for size in sizes))
        return Choice(self.costs, (Range(0, best),), self.measurements, self.floor)

    def fastest_wire(self, bucket_bytes: Iterable[int]) -> str:
        """The wire that takes least time for these buckets; one that rounds more only if it saves enough.

        A wire all of whose candidates were left behind before the largest of them is not taken: what is measured
        there may have met a busy moment, what is extrapolated never does.
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
        """A bucket in which latency is a small share of the time, yet several of which make up the gradients.

        The smallest power of two whose predicted rate, bytes by time, is 8/9 of the best of any. At most a quarter
        of `gradient_bytes`, a model's; between 512 KiB and 32 MiB. Without `overlap` one bucket, up to 32 MiB.
        """
        if not overlap:
            return max(SMALLEST_BUCKET_BYTES, min(gradient_bytes + BESIDE_GRADIENTS, LARGEST_BUCKET_BYTES))
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
        """Of what `ranges_to_json` made. ValueError where it is something else."""
        try:
            ranges = tuple(
                Range(int(v["from_bytes"]), Candidate(str(v["algorithm"]), str(v["wire"]))) for v in value
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"no ranges: {error}") from error
        if not ranges or [r.begin for r in ranges] != sorted({0, *(r.begin for r in ranges)}):
            raise ValueError("no ranges: they do not go up from 0")
        return cls({}, ranges)

    def describe(self) -> str:
        """`flat up to 64 KB, then hierarchical-ring`."""
        parts = []
        for this, following in zip(self.ranges, self.ranges[1:], strict=False):
            parts.append(f"{this.candidate.algorithm} up to {_show_bytes(following.begin)}")
        return ", then ".join([*parts, self.ranges[-1].candidate.algorithm])

    def record(self) -> dict[str, Any]:
        """For the run's record: what is chosen from which size on, and each candidate's numbers as measured.

        floor_seconds_per_byte: no time below size times this counts when candidates are compared; 0 where the
        links set none.
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


def roundings(wire: str) -> int:
    """Order of the wires: what rounds more has the larger number."""
    return EXACTNESS.index(wire) if wire in EXACTNESS else len(EXACTNESS)


def measurements_to_json(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    return [asdict(m) for m in measurements]


def measurements_from_json(value: Any) -> list[Measurement]:
    """ValueError where it is not what `measurements_to_json` made."""
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
    """The candidates that were measured as far as any was, or at least at `num_bytes`; in order."""
    furthest = max(cost.points[-1][0] for cost in costs.values())
    return [c for c, cost in costs.items() if cost.points[-1][0] >= min(num_bytes, furthest)]


def _floored(cost: Cost, least: float) -> Cost:
    """No size takes less than its bytes do at `least` seconds each; of equals the faster one stays the better.

    Where the link explains most of the largest size's time, it is what larger ones take longer by: the difference of
    two trials says less of it, as one that met a busy moment makes it anything.
    """
    sizes = [n for n, _ in cost.points]
    for (low, low_s), (high, high_s) in pairwise(cost.points):
        over, under = low_s - low * least, high * least - high_s
        if over * under > 0:  # here the floor begins to count, or ends to; not halfway to the next size
            sizes.append(low + round((high - low) * over / (over + under)))
    measured = [(n, cost.at(n)) for n in sizes]
    floored = Cost.fit((n, max(s, n * least) + MEASURED_BESIDE_FLOOR * s) for n, s in measured)
    last_bytes, last_s = cost.points[-1]
    decided = last_bytes * least >= DECIDED_BY_LINK * last_s
    return replace(floored, slope=least if decided else max(floored.slope, least))


def _by_candidate(measurements: Iterable[Measurement]) -> dict[Candidate, list[tuple[int, float]]]:
    """(bytes, seconds) of each."""
    found: dict[Candidate, list[tuple[int, float]]] = {}
    for m in measurements:
        found.setdefault(m.candidate, []).append((m.num_bytes, m.seconds))
    return found


def _ranges(costs: Mapping[Candidate, Cost]) -> tuple[Range, ...]:
    """The best candidate changes where two costs cross, so only those sizes need to be looked at."""
    sizes = {0}
    fitted = list(costs.values())
    for place, one in enumerate(fitted):
        for other in fitted[place + 1 :]:
            for crossing in one.crossings(other):
                if crossing <= LARGEST_SIZE:
                    sizes.update(range(max(0, math.floor(crossing) - 1), math.floor(crossing) + 3))
        sizes.update(size for size, _ in one.points)  # equal up to there, and not beyond
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
