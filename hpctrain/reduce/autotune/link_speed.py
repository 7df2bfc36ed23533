"""Measures latency and bandwidth within a node and between nodes, for the run's record and the link floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hpctrain.comm import Collective, ReduceOp, World
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
    """Speed along one axis, `local` or `node`. num_members: number of ranks of its largest group.

    latency_s: time of an all-reduce of one number. bytes_per_s: rate at which one rank sends within its node, or one
    node to the others, in an all-reduce of large buffers by the backend, computed for a ring.
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
    """Measures the axes that have several members. Collective; the result is the same on every rank.

    A few reductions per axis; fewer and smaller ones once `budget_s` is exceeded by the slowest rank's clock.
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
    """Times the all-reduce of one group while all others run theirs; a rank in no group only waits."""

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
        """Returns the time of one reduction on the slowest rank: the median of up to `trials`, within the time budget.

        in_a_row: number of consecutive reductions of a trial; the first is not timed if there are several. Collective.
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
    """Inverse of `levels_to_json`. Raises ValueError for anything else."""
    try:
        return tuple(
            LinkSpeed(
                axis=str(v["axis"]), num_members=int(v["num_members"]), latency_s=float(v["latency_s"]),
                bytes_per_s=float(v["bytes_per_s"]),
            )
            for v in value
        )  # fmt: skip
    except (TypeError, KeyError) as error:
        raise ValueError(f"no levels: {error}") from error
