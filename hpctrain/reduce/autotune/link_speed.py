"""Measured speed of links, the time of a reduction by the size of its buffer, and a lower bound of that time.

The time of a message is usually modelled by a latency and a time per byte (Hockney 1994,
doi:10.1016/S0167-8191(06)80021-9). This model is valid only within a range of sizes, since libraries change their
protocol with the size, and caches are limited. So `TimeBySize` is piecewise linear between the measured sizes.

`LinkFloor` is the lower bound for links between nodes: the bytes that leave a node, divided by the rate of the node's
link. A trial, which is a short measurement, can be faster than this bound, because the queues and shapers of a link
accept some hundred KB at once, however slow the link is; a training step cannot be faster. So shorter times are raised
to the bound when candidates are compared.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from hpctrain.comm import Collective, ReduceOp, World
from hpctrain.errors import UsageError
from hpctrain.reduce.wire_formats import share_of_float32
from hpctrain.topology import Topology

AXES = {"local": "within the node", "node": "between nodes"}
LATENCY_TRIALS = 5
BANDWIDTH_TRIALS = 2
SOME_BYTES = 1 << 18
MANY_BYTES = 1 << 22
# If `SOME_BYTES` take less than this, they are too few to measure the link.
QUICK_S = 5e-3
# If they take longer than this, one trial alone shows the link's rate.
SLOW_S = 0.1
IN_A_ROW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Speed along one axis, `local` or `node`.

    num_members: number of ranks of the largest group along the axis.
    latency_s: time of an all-reduce of one number, in seconds.
    bytes_per_s: rate at which one rank sends within its node (`local`), or one node sends to other nodes (`node`),
    in bytes per second. Measured with the backend's all-reduce of a large buffer; the bytes sent are computed for a
    ring.
    """

    axis: str
    num_members: int
    latency_s: float
    bytes_per_s: float

    def describe(self) -> str:
        return f"{AXES[self.axis]} {self.latency_s * 1e6:.0f} us, {self.bytes_per_s / 1e6:.0f} MB/s"


def measure_levels(
    world: World,
    topology: Topology,
    *,
    device: torch.device,
    budget_s: float = 0.4,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[LinkSpeed, ...]:
    """Measures the link speed along each axis with groups of several ranks. Collective.

    Returns the same result on every rank. Runs a few reductions per axis; once the slowest rank has used more than
    `budget_s` seconds, the reductions are fewer and smaller.
    """
    found = []
    began = clock()
    for axis in AXES:
        groups = topology.groups(axis)
        num_members = max(len(group) for group in groups)
        if num_members == 1:
            continue
        timer = _Timer(
            world, world.split(groups), device=device, clock=clock, began=began, budget_s=budget_s / len(AXES)
        )
        timer.seconds(8, trials=1)  # makes the connections
        latency = timer.seconds(8, trials=LATENCY_TRIALS)
        num_bytes = SOME_BYTES
        seconds = timer.seconds(num_bytes, trials=BANDWIDTH_TRIALS)
        if seconds < QUICK_S and timer.left_s > 0:
            num_bytes = MANY_BYTES
            seconds = timer.seconds(num_bytes, trials=BANDWIDTH_TRIALS)
        elif seconds < SLOW_S and timer.left_s > 0:
            # A single reduction may fit into the link's queues and shapers.
            seconds = max(seconds, timer.seconds(num_bytes, trials=1, in_a_row=IN_A_ROW))
        began += budget_s / len(AXES)
        # All groups of the node axis share the links of their nodes.
        sharers = len(groups) if axis == "node" else 1
        sent = 2 * (num_members - 1) / num_members * num_bytes * sharers
        rate = sent / max(seconds - latency, seconds / 2)
        found.append(LinkSpeed(axis=axis, num_members=num_members, latency_s=latency, bytes_per_s=rate))
    return tuple(found)


class _Timer:
    """Times the all-reduce of this rank's group while all other groups run theirs; a rank in no group only waits."""

    def __init__(
        self,
        world: World,
        group: Collective | None,
        *,
        device: torch.device,
        clock: Callable[[], float],
        began: float,
        budget_s: float,
    ) -> None:
        self._world = world
        self._group = group
        self._device = device
        self._clock = clock
        self._began = began
        self._budget_s = budget_s
        self.left_s = budget_s

    def seconds(self, num_bytes: int, *, trials: int, in_a_row: int = 1) -> float:
        """Returns the time of one reduction on the slowest rank, in seconds. Collective.

        It is the median of at most `trials` trials, or of fewer if the time budget is used up.

        in_a_row: number of consecutive reductions per trial; if there are several, the first is not timed.
        """
        buffer = torch.zeros(num_bytes // 4, device=self._device)
        found: list[float] = []
        while not found or (len(found) < trials and self.left_s > 0):
            self._world.barrier()
            begin = self._clock()
            if self._group is not None:
                for number in range(in_a_row):
                    if number == 1:
                        begin = self._clock()
                    self._group.all_reduce(buffer)
                    if self._device.type == "cuda":
                        torch.cuda.synchronize(self._device)
            end = self._clock()
            spent = (end - begin) / max(1, in_a_row - 1)
            numbers = torch.tensor([spent, end - self._began], dtype=torch.float64)
            self._world.all_reduce(numbers, op=ReduceOp.MAX)
            found.append(max(float(numbers[0]), 1e-9))
            self.left_s = self._budget_s - float(numbers[1])
        return statistics.median_low(found)


def levels_to_json(levels: tuple[LinkSpeed, ...]) -> list[dict[str, Any]]:
    return [asdict(level) for level in levels]


def levels_from_json(value: Any) -> tuple[LinkSpeed, ...]:
    """Returns the link speeds from their JSON form, a result of `levels_to_json`.

    Raises ValueError for anything else.
    """
    try:
        return tuple(
            LinkSpeed(
                axis=str(v["axis"]), num_members=int(v["num_members"]), latency_s=float(v["latency_s"]),
                bytes_per_s=float(v["bytes_per_s"]),
            )
            for v in value
        )  # fmt: skip
    except (TypeError, KeyError) as error:
        raise ValueError(f"these are no link speeds: {error}") from error


# Minimum share of the largest measured size's time that is attributed to its bytes.
LEAST_SHARE_OF_BYTES = 0.1


class Candidate(NamedTuple):
    """An algorithm and a wire format, by their names in the recipe."""

    algorithm: str
    wire: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Time of one reduction on the slowest rank.

    num_bytes: size of the gradients, before the cast to the wire format.
    """

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
class TimeBySize:
    """Time of a reduction as a piecewise linear function of its size.

    points: measured pairs (bytes, seconds), both ascending.
    latency_s: seconds at size 0.
    slope: seconds per byte beyond the last point.
    """

    points: tuple[tuple[int, float], ...]
    latency_s: float
    slope: float

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, float]]) -> TimeBySize:
        """Fits the function to pairs (bytes, seconds); if one size has several times, the shortest is used.

        Noise only adds time. So if a larger size took less time than a smaller size, the shorter time is used for both.
        Raises UsageError if there are no pairs.
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
        """Returns the seconds for a bucket of `num_bytes`. A larger bucket never takes less time."""
        place = bisect_right(self.points, num_bytes, key=lambda point: point[0])
        if place == len(self.points):
            last_bytes, last_s = self.points[-1]
            return last_s + (num_bytes - last_bytes) * self.slope
        low_bytes, low_s = self.points[place - 1] if place else (0, self.latency_s)
        high_bytes, high_s = self.points[place]
        share = (num_bytes - low_bytes) / (high_bytes - low_bytes)
        return min(high_s, low_s + share * (high_s - low_s))


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


TWO_LEVEL = ("hierarchical", "hierarchical-ring", "hierarchical-flat")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFloor:
    """Lower bound of a reduction's time, given by the rate of the links between nodes.

    ranks_per_node: number of ranks on the largest node.
    bytes_per_s: rate of a node's link, in bytes per second.
    """

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    bytes_per_s: float

    @classmethod
    def of(cls, topology: Topology, levels: Iterable[LinkSpeed]) -> LinkFloor | None:
        """Returns the lower bound for a topology and its measured links.

        Returns None if there is only one node, or if no link between nodes was measured.
        """
        rates = [level.bytes_per_s for level in levels if level.axis == "node"]
        if topology.num_nodes == 1 or not rates:
            return None
        return cls(
            num_ranks=topology.num_ranks, num_nodes=topology.num_nodes,
            ranks_per_node=max(len(group) for group in topology.groups("local")), bytes_per_s=rates[0],
        )  # fmt: skip

    def sent(self, candidate: Candidate) -> float:
        """Returns how many bytes leave the busiest node per byte of gradients; 0 if unknown.

        Bytes of gradients are counted before the cast to the wire format. Source for two levels and for a ring:
        Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002. `flat` is the backend's own algorithm, which does not
        distinguish nodes: at best it is a ring over all ranks.
        """
        share = share_of_float32(candidate.wire) or 0.0
        if candidate.algorithm in TWO_LEVEL:
            return share * 2 * (self.num_nodes - 1) / self.num_nodes
        if candidate.algorithm in ("ring", "flat"):
            # Ranks of a node are neighbours in the ring, so one of them sends to the next node.
            return share * 2 * (self.num_ranks - 1) / self.num_ranks
        if candidate.algorithm == "direct":  # each sends a slice to every rank of other nodes, twice
            elsewhere = self.num_ranks - self.ranks_per_node
            return share * 2 * self.ranks_per_node * elsewhere / self.num_ranks
        return 0.0

    def seconds_per_byte(self, candidate: Candidate) -> float:
        """Returns the bound in seconds per byte of gradients, counted before the cast to the wire format."""
        return self.sent(candidate) / self.bytes_per_s
