"""Simulates a job on nodes that fail: checkpoints, lost work, restarts, spare nodes, queue time. Needs simpy."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from hpctrain.errors import UsageError

# Events are the failures, repairs and attempts of one job, a few thousand per year, so a discrete-event simulation of
# processes that wait for each other is the plain way to write it (SimPy, https://simpy.readthedocs.io).

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A training job and its failures. All times are in seconds.

    Attributes:
        nodes: The number of nodes that train.
        spares: The number of further nodes of the job, which wait to replace a failed node.
        node_hours_between_failures: The mean time in hours between two failures of one node. The times between
            failures are exponentially distributed.
        repair_s: The time from the failure of a node until it is available as a spare.
        interval_s: The training time between two saves.
        save_s: The time for which a save stops training.
        detect_s: The time until a failure is noticed.
        restart_s: The time to start the ranks and load the checkpoint.
        queue_s: The mean time in the queue for a new allocation if nodes are missing, exponentially distributed.
    """

    nodes: int
    node_hours_between_failures: float
    interval_s: float
    save_s: float
    spares: int = 0
    repair_s: float = 4 * HOUR_S
    detect_s: float = 60.0
    restart_s: float = 300.0
    queue_s: float = HOUR_S

    def __post_init__(self) -> None:
        times = (self.repair_s, self.detect_s, self.restart_s, self.queue_s)
        if self.nodes < 1 or self.spares < 0 or min(times) < 0 or self.save_s < 0 or not self.interval_s > 0:
            raise UsageError("a job has at least one node, an interval above 0, and no negative time")
        if not self.node_hours_between_failures > 0:
            raise UsageError("the hours between the failures of a node must be above 0")

    @property
    def between_failures_s(self) -> float:
        """The mean seconds between failures of the nodes that train."""
        return self.node_hours_between_failures * HOUR_S / self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job spent its time, in shares that add up to 1, and the number of failures.

    Attributes:
        trained: The share of the job's time in which the ranks trained and the result was kept.
        saving: The share in which saves stopped training.
        lost: The share in which the ranks trained and the result was lost, since a failure came before the next save.
        down: The share of detecting failures and of restarting.
        queued: The share of waiting for nodes.
    """

    trained: float
    saving: float
    lost: float
    down: float
    queued: float
    failures: int


def simulate_job(job: SimulatedJob, *, hours: float, seed: int = 0) -> Outcome:
    """Simulates `hours` of the job. Raises UsageError if simpy is not installed."""
    try:
        import simpy
    except ImportError:
        raise UsageError(
            "the simulation of failures needs simpy, which is not installed: pip install 'hpctrain[predict]'"
        ) from None
    if not hours > 0:
        raise UsageError(f"{hours} hours: give a time above 0")
    environment = simpy.Environment()
    run = _Run(job, environment, interrupt=simpy.Interrupt, generator=random.Random(seed))
    environment.process(run.train())
    environment.run(until=hours * HOUR_S)
    return run.outcome(hours * HOUR_S)


@final
class _Run:
    """The processes of one simulated job, and the seconds that they have spent on each activity."""

    def __init__(
        self, job: SimulatedJob, environment: Any, *, interrupt: type[Exception], generator: random.Random
    ) -> None:
        self._job = job
        self._environment = environment
        self._interrupt = interrupt
        self._random = generator
        self._spares = job.spares
        self._trained = self._saving = self._lost = self._down = self._queued = 0.0
        self._failures = 0
        self._allocation = 0
        self._repaired: Any = environment.event()

    def outcome(self, total_s: float) -> Outcome:
        unfinished = total_s - (self._trained + self._saving + self._lost + self._down + self._queued)
        return Outcome(
            trained=(self._trained + max(0.0, unfinished)) / total_s, saving=self._saving / total_s,
            lost=self._lost / total_s, down=self._down / total_s, queued=self._queued / total_s,
            failures=self._failures,
        )  # fmt: skip

    def train(self) -> Generator[Any, Any, None]:
        """Simulates attempts, one after another. Each ends with a failure."""
        while True:
            attempt = self._environment.process(self._attempt())
            self._environment.process(self._failure(attempt))
            yield attempt
            self._failures += 1
            self._environment.process(self._repair(self._allocation))
            yield from self._wait(self._job.detect_s)
            yield from self._find_node()
            yield from self._wait(self._job.restart_s)

    def _attempt(self) -> Generator[Any, Any, None]:
        """Trains and saves until a failure interrupts it. Training since the last save is lost."""
        while True:
            began = self._environment.now
            try:
                yield self._environment.timeout(self._job.interval_s)
                yield self._environment.timeout(self._job.save_s)
            except self._interrupt:
                self._lost += self._environment.now - began
                return
            self._trained += self._job.interval_s
            self._saving += self._job.save_s

    def _failure(self, attempt: Any) -> Generator[Any, Any, None]:
        yield self._environment.timeout(self._random.expovariate(1 / self._job.between_failures_s))
        attempt.interrupt()

    def _repair(self, allocation: int) -> Generator[Any, Any, None]:
        """Makes the failed node a spare again, if the job still has the same allocation."""
        yield self._environment.timeout(self._job.repair_s)
        if allocation == self._allocation:
            self._spares += 1
            self._repaired.succeed()
            self._repaired = self._environment.event()

    def _find_node(self) -> Generator[Any, Any, None]:
        """Takes a spare node.

        Without one, the job waits for a new allocation with all nodes, or for a repaired node.
        """
        if self._spares == 0:
            began = self._environment.now
            queue_s = self._random.expovariate(1 / self._job.queue_s) if self._job.queue_s > 0 else 0.0
            yield self._environment.timeout(queue_s) | self._repaired
            self._queued += self._environment.now - began
            if self._spares == 0:
                self._allocation += 1
                self._spares = self._job.spares
                return
        self._spares -= 1

    def _wait(self, seconds: float) -> Generator[Any, Any, None]:
        yield self._environment.timeout(seconds)
        self._down += seconds


def sweep(
    job: SimulatedJob, *, intervals_s: Sequence[float], spares: Sequence[int], hours: float, seed: int = 0
) -> dict[tuple[float, int], Outcome]:
    """Returns the outcome for each pair (interval in seconds, number of spare nodes), all with the same seed."""
    return {
        (interval_s, count): simulate_job(
            replace(job, interval_s=interval_s, spares=count), hours=hours, seed=seed
        )
        for count in spares
        for interval_s in intervals_s
    }
