"""Choice of the reduction of a run, from measurements. Pure.

The candidate with the lowest fitted cost of all buckets of a step is chosen. If several candidates have this cost, the
candidate that was measured first is chosen. A candidate that was dropped before it was measured at the size of the
largest bucket is not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.reduce.autotune.link_speed import Candidate, LinkFloor, Measurement, TimeBySize
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


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates for the reduction, with their costs. Made by `of_measurements`, or by `only` for one candidate.

    candidates: the candidates; of several candidates with equal costs, the first is chosen.
    costs: fitted cost of each candidate; empty if nothing was measured.
    measurements: times from which the costs were fitted.
    floor: lower bound of the time that the links between nodes need; None if unknown.
    """

    candidates: tuple[Candidate, ...]
    costs: Mapping[Candidate, TimeBySize] = field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()
    floor: LinkFloor | None = None

    @classmethod
    def only(cls, candidate: Candidate) -> Choice:
        """Returns the choice of the only candidate, without measurements."""
        return cls((candidate,))

    @classmethod
    def of_measurements(
        cls, measurements: Sequence[Measurement], *, floor: LinkFloor | None = None
    ) -> Choice:
        """Makes the choice from measurements. Raises UsageError if there are no measurements.

        floor: lower bound of the time that the links between nodes need; shorter measured times are raised to this
        bound.
        """
        if not measurements:
            raise UsageError("no measurements to choose by: give at least one of a candidate")
        costs = {
            candidate: TimeBySize.fit(points) for candidate, points in _by_candidate(measurements).items()
        }
        if floor is not None:
            costs = {c: _floored(cost, floor.seconds_per_byte(c)) for c, cost in costs.items()}
        return cls(tuple(costs), costs, tuple(measurements), floor)

    def fastest(self, bucket_bytes: Iterable[int]) -> Candidate:
        """Returns the candidate that reduces all these buckets fastest.

        bucket_bytes: for each bucket, the bytes of its gradients before the cast to the wire format.
        """
        if not self.costs:
            return self.candidates[0]
        sizes = list(bucket_bytes)
        among = eligible(self.costs, max(sizes, default=0))
        return min(among, key=lambda candidate: self._total_s(candidate, sizes))

    def seconds(self, bucket_bytes: Iterable[int]) -> float:
        """Returns the predicted seconds of the fastest candidate for all these buckets; 0 if nothing was measured.

        bucket_bytes: for each bucket, the bytes of its gradients before the cast to the wire format.
        """
        sizes = list(bucket_bytes)
        return self._total_s(self.fastest(sizes), sizes) if self.costs else 0.0

    def _total_s(self, candidate: Candidate, sizes: Sequence[int]) -> float:
        return sum(self.costs[candidate].at(size) for size in sizes)

    def for_wire(self, wire: str) -> Choice:
        """Returns the choice among the candidates with the wire format `wire`. Raises UsageError if there are none."""
        if not self.costs:
            if self.candidates[0].wire == wire:
                return self
            raise UsageError(
                f"no candidate with the wire format {wire} was measured: choose another wire format"
            )
        mine = [m for m in self.measurements if m.wire == wire]
        return Choice.of_measurements(mine, floor=self.floor)

    def fastest_wire(self, bucket_bytes: Iterable[int]) -> str:
        """Returns the fastest wire format for these buckets.

        bucket_bytes: for each bucket, the bytes of its gradients before the cast to the wire format.

        A wire format that rounds more is chosen only if it saves enough time. A wire format that was not measured up to
        the size of the largest bucket is not chosen: measured times may include a moment at which the machine was busy,
        and extrapolated times never do, so that extrapolated times would be preferred wrongly.
        """
        sizes = list(bucket_bytes)
        among = eligible(self.costs, max(sizes, default=0)) if self.costs else self.candidates
        ordered = sorted(dict.fromkeys(c.wire for c in among), key=roundings)
        chosen = ordered[0]
        if not self.costs:
            return chosen
        chosen_s = self.for_wire(chosen).seconds(sizes)
        worth = WORTH_ROUNDING_ON_LINKS if self._decided_by_link(chosen, sizes) else WORTH_ROUNDING
        for wire in ordered[1:]:
            seconds = self.for_wire(wire).seconds(sizes)
            if seconds < (1 - worth) * chosen_s:
                chosen, chosen_s = wire, seconds
        return chosen

    def _decided_by_link(self, wire: str, sizes: Sequence[int]) -> bool:
        if self.floor is None:
            return False
        choice = self.for_wire(wire)
        link_s = sum(sizes) * self.floor.seconds_per_byte(choice.fastest(sizes))
        return link_s >= DECIDED_BY_LINK * choice.seconds(sizes)

    def bucket_bytes(self, *, gradient_bytes: int, overlap: bool = True) -> int:
        """Returns a bucket size at which latency is a small share of the time, but the model has several buckets.

        The bucket size is the smallest power of two at which the predicted rate (bytes per second) reaches 8/9 of the
        best rate, but at most a quarter of `gradient_bytes`, and between 512 KiB and 32 MiB. Without `overlap` the
        bucket size is that of one bucket for all gradients, at most 32 MiB.

        gradient_bytes: size of all gradients of the model, in bytes.
        overlap: True if reductions overlap with backward.
        """
        if not overlap:
            return max(SMALLEST_BUCKET_BYTES, min(gradient_bytes + OTHER_BUCKET_BYTES, LARGEST_BUCKET_BYTES))
        size = DEFAULT_BUCKET_BYTES
        if self.costs:
            sizes = [SMALLEST_BUCKET_BYTES]
            while sizes[-1] < LARGEST_BUCKET_BYTES:
                sizes.append(2 * sizes[-1])
            rates = [n / self.seconds([n]) for n in sizes]
            size = next(n for n, rate in zip(sizes, rates, strict=True) if rate >= EFFICIENCY * max(rates))
        quarter = math.ceil(gradient_bytes / LEAST_BUCKETS)
        return max(SMALLEST_BUCKET_BYTES, min(size, quarter))

    def record(self) -> dict[str, Any]:
        """Returns each candidate's measurements as JSON values, for the run's record.

        The entry `floor_seconds_per_byte` is the lower bound of the time per byte that is used to compare candidates; 0
        if there is no lower bound.
        """
        candidates = []
        for candidate, points in _by_candidate(self.measurements).items():
            cost = TimeBySize.fit(points)
            candidates.append({
                **candidate._asdict(), "latency_s": cost.latency_s, "seconds_per_byte": cost.slope,
                "floor_seconds_per_byte": self.floor.seconds_per_byte(candidate) if self.floor else 0.0,
                "measured": [{"bytes": size, "seconds": seconds} for size, seconds in points],
            })  # fmt: skip
        return {"candidates": candidates}


def measurements_to_json(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    return [asdict(m) for m in measurements]


def measurements_from_json(value: Any) -> list[Measurement]:
    """Returns the measurements from their JSON form, a result of `measurements_to_json`.

    Raises ValueError for anything else.
    """
    try:
        found = [
            Measurement(
                algorithm=str(m["algorithm"]), wire=str(m["wire"]), num_bytes=int(m["num_bytes"]),
                seconds=float(m["seconds"]),
            )
            for m in value
        ]  # fmt: skip
    except (TypeError, KeyError, UsageError) as error:
        raise ValueError(f"these are no measurements: {error}") from error
    if not found:
        raise ValueError("no measurements: the list is empty")
    return found


def eligible(costs: Mapping[Candidate, TimeBySize], num_bytes: float) -> list[Candidate]:
    """Returns the candidates that were measured at `num_bytes` or more.

    If no candidate was measured at so large a size, returns the candidates that were measured at the largest size of
    all.
    """
    furthest = max(cost.points[-1][0] for cost in costs.values())
    return [c for c, cost in costs.items() if cost.points[-1][0] >= min(num_bytes, furthest)]


def _floored(cost: TimeBySize, least: float) -> TimeBySize:
    """Returns `cost` with every time raised to at least `least` seconds per byte.

    A small share of the measured time is added, so that candidates with equal bounds differ. If the bound is at least
    half of the time of the largest measured size, the bound is also the slope beyond that size: the difference of two
    trials is less reliable, since each trial may include a moment at which the machine was busy.
    """
    sizes = [n for n, _ in cost.points]
    for (low, low_s), (high, high_s) in pairwise(cost.points):
        over, under = low_s - low * least, high * least - high_s
        if over * under > 0:  # cost and floor cross between the two sizes: add the crossing
            sizes.append(low + round((high - low) * over / (over + under)))
    measured = [(n, cost.at(n)) for n in sizes]
    floored = TimeBySize.fit((n, max(s, n * least) + MEASURED_SHARE * s) for n, s in measured)
    last_bytes, last_s = cost.points[-1]
    decided = last_bytes * least >= DECIDED_BY_LINK * last_s
    return replace(floored, slope=least if decided else max(floored.slope, least))


def _by_candidate(measurements: Iterable[Measurement]) -> dict[Candidate, list[tuple[int, float]]]:
    """Returns (bytes, seconds) of each candidate's measurements."""
    found: dict[Candidate, list[tuple[int, float]]] = {}
    for m in measurements:
        found.setdefault(m.candidate, []).append((m.num_bytes, m.seconds))
    return found
