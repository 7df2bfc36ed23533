"""Trials: short measurements of the candidate reductions, on the ranks and links of this run.

The size of the buckets grows until the time is used up, and candidates that are clearly slower are dropped. All
decisions use times that are reduced by MAX over the ranks, so that all ranks decide alike.

With a core for each rank, a trial measures the duration of a reduction that runs by itself. If there are more ranks
than cores, the trials run during computation. A bucket that is reduced during backward then needs two resources. The
link between the nodes is busy for L seconds with the bytes of the bucket (`link_speed.py`); the cores compute in this
time. The cores need C seconds for the backward passes of the ranks and P seconds for the reduction: sums, casts,
messages, and polls while a rank waits for others. While one rank waits, another rank computes, so the step takes
max(L, C + P). C is not known when the reduction is chosen, but it is the same for all candidates. So candidates are
compared by max(L, P).

P cannot be measured with a reduction that runs by itself: such a reduction polls as often as an idle core allows, and
all ranks start it at the same moment. So a trial is a small step: each rank computes, starts the reduction on a thread
as training does, continues to compute, and waits for the reduction. P is the time of this trial on the slowest rank,
minus the time of the same computation without a reduction. P includes waiting that the computation does not hide, as
in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

import torch

from hpctrain.comm import Collective, ReduceOp
from hpctrain.errors import CommunicationError, UsageError
from hpctrain.reduce.autotune.decision import MEASURED_SHARE
from hpctrain.reduce.autotune.link_speed import Candidate, LinkFloor, Measurement, TimeBySize
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.reduce.contract.bucket_reducer import LONGEST_WAIT_OVERSUBSCRIBED_S, BucketReducer, run_to_end
from hpctrain.reduce.data_parallel.reduction_thread import ReductionPipeline
from hpctrain.reduce.wire_formats import ELEMENT_BYTES

# Side of the square matrices of one product: about half a millisecond of a core, as one operation of a small model.
SIDE = 224
UNITS_TO_TIME = 6
# Least time of a trial's computation: several time slices of the kernel's scheduler, so that ranks of one core
# arrive one after another, as they do in training.
LEAST_LOAD_S = 8e-3


# Computes a number of units, all of the same duration, on the calling thread.
Compute = Callable[[int], object]


@final
class MatrixProducts:
    """A computation that consists of units. One unit is one product of two matrices. This object holds the matrices."""

    def __init__(self) -> None:
        self._factors = torch.full((2, SIDE, SIDE), 0.5)
        self._product = torch.empty(SIDE, SIDE)

    def __call__(self, units: int) -> None:
        for _ in range(units):
            torch.mm(self._factors[0], self._factors[1], out=self._product)


@final
class ComputeLoad:
    """Computation of a known duration. The constructor is collective.

    compute: function that computes a given number of units.
    largest: function that returns the largest value that any rank passes; collective.

    unit_s: seconds that one unit takes while all ranks compute, the same on every rank.
    """

    def __init__(
        self, compute: Compute, *, largest: Callable[[float], float], clock: Callable[[], float]
    ) -> None:
        self.compute = compute
        compute(UNITS_TO_TIME)  # fills the caches
        largest(0.0)  # synchronizes the ranks
        began = clock()
        compute(UNITS_TO_TIME)
        self.unit_s = max(largest(clock() - began) / UNITS_TO_TIME, 1e-6)

    def half_units(self, seconds: float) -> int:
        """Returns the number of units that fill half of `seconds`, or of 8 ms if that is longer; at least 1."""
        return max(1, round(max(seconds, LEAST_LOAD_S) / 2 / self.unit_s))


# Short trials of the candidate reductions, on the ranks and links of this run.


# (algorithm, wire) -> a reducer with a separate message space. Collective. Raises UsageError on every rank if the
# combination is not available.
MakeReducer = Callable[[str, str], BucketReducer]

SMALLEST_BYTES = 1 << 12
LARGEST_BYTES = 1 << 24
GROWTH = (8, 4, 2)  # factors to the next size; smaller ones if the time is too short for a larger one
MAX_ROUNDS = 5
# At sizes where bandwidth is compared there are more rounds: after `ROUNDS_OF_ALL` only of the candidates within a
# factor of `CONTENDS` of the best.
MAX_ROUNDS_COMPARED = 15
ROUNDS_OF_ALL = 2
CONTENDS = 1.5
# A trial of fast reductions repeats them up to this time, since ranks never start at exactly the same moment.
TRIAL_S = 5e-4
MAX_REPEATS = 8
# Maximum share of the remaining time for the rounds of one size, and of a small size.
SHARE_OF_REST = 0.5
SHARE_OF_SMALL = 0.15
CLEARLY_SLOWER = 2.0
CLEARLY_MORE = 1.3
# Below this size latency dominates, which does not predict the times of large sizes.
COMPARED_FROM_BYTES = 1 << 18
# From this size on only `FEW` candidates are measured: each needs a bucket of several MB on each of a node's ranks.
FEW_FROM_BYTES = 1 << 22
FEW = 4
# Minimum share of a trial during computation that is attributed to the reduction: what noise may hide.
LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Result of the trials (short measurements of the candidate reductions), the same on every rank.

    seconds: duration of the trials.
    notes: texts for the user that say what was not measured, and why.
    """

    measurements: tuple[Measurement, ...]
    seconds: float
    notes: tuple[str, ...] = ()


def calibrate(
    comm: Collective,
    *,
    make: MakeReducer,
    candidates: Sequence[Candidate],
    device: torch.device,
    floor: LinkFloor | None = None,
    compute: Compute | None = None,
    budget_s: float = 1.3,
    largest_bytes: int = LARGEST_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measures the candidates for about `budget_s` seconds by the slowest rank's clock. Collective over `comm`.

    A reduction that has started is never aborted. So the measurements exceed `budget_s` if their last reduction takes
    longer than predicted. The reducers are closed at the end.

    make: function that creates the reducer of a candidate.
    floor: lower bound of the time that the links between nodes need. For sizes at which this bound exceeds the latency,
    candidates that send clearly more bytes than another candidate are not measured.
    compute: computation during which the reductions run; the measured time is the time by which a reduction prolongs
    the computation. None: the reductions run by themselves.

    Raises UsageError on every rank if no candidate can be created.
    """
    trials = _Trials(comm, device=device, clock=clock, budget_s=budget_s, compute=compute)
    notes: list[str] = []
    running: list[_Running] = []
    for candidate in candidates:
        try:
            running.append(_Running(candidate, make(*candidate)))
        except UsageError as error:
            notes.append(f"not measured: {candidate.algorithm} with {candidate.wire}: {error}")
    if not running:
        raise UsageError("none of the reductions is available here: " + "; ".join(notes), agreed=True)
    if compute is not None:
        for one in running:
            one.pipeline = ReductionPipeline(
                one.reducer.reduce, device=device, longest_wait_s=LONGEST_WAIT_OVERSUBSCRIBED_S
            )
    contest = _Contest(running, trials=trials, device=device, notes=notes, floor=floor)
    # Trials during computation are long, and there may be time for only one size: start with that of a small bucket.
    num_bytes: int | None = SMALLEST_BYTES if compute is None else COMPARED_FROM_BYTES
    while num_bytes is not None and num_bytes <= largest_bytes and contest.measure(num_bytes):
        contest.drop_slow(num_bytes)
        num_bytes = contest.next_size(num_bytes)
    for one in running:
        one.close()
    measured = [
        Measurement(
            algorithm=one.candidate.algorithm, wire=one.candidate.wire, num_bytes=size, seconds=seconds
        )
        for one in running
        for size, seconds in one.measured
    ]
    return Calibration(measurements=tuple(measured), seconds=trials.elapsed_s(), notes=tuple(notes))


@dataclass(slots=True)
class _Running:
    """A candidate reduction that is being measured, and its measurements: (bytes, seconds), the same on every rank."""

    candidate: Candidate
    reducer: BucketReducer
    pipeline: ReductionPipeline | None = None  # for trials during computation
    measured: list[tuple[int, float]] = field(default_factory=list)
    warm_up_s: float = 0.0

    def close(self) -> None:
        """Ends the thread and closes the reducer. Collective."""
        if self.pipeline is not None:
            self.pipeline.close()
        self.reducer.close()

    def fitted_s(self, num_bytes: int) -> float:
        return TimeBySize.fit(self.measured).at(num_bytes)

    def expected_s(self, num_bytes: int) -> float:
        """Returns an upper estimate of the time of a reduction, in seconds.

        num_bytes: size of the bucket, larger than the sizes measured so far.
        """
        last_bytes, last_s = self.measured[-1]
        at_most = last_s * num_bytes / last_bytes
        by_slope = self.fitted_s(num_bytes)
        # Small sizes are dominated by latency and do not predict larger ones.
        return by_slope if len(self.measured) > 2 else (by_slope + at_most) / 2


@final
class _Trials:
    """Times single trials (short measurements of a reduction), and keeps account of the remaining time.

    Its methods are collective.
    """

    def __init__(
        self,
        comm: Collective,
        *,
        device: torch.device,
        clock: Callable[[], float],
        budget_s: float,
        compute: Compute | None,
    ) -> None:
        self._comm = comm
        self._device = device
        self._clock = clock
        self._budget_s = budget_s
        self._began = clock()
        self.left_s = budget_s
        self.load: ComputeLoad | None = None
        if compute is not None:
            self.load = ComputeLoad(compute, largest=lambda mine: self._largest(mine)[0], clock=clock)

    def time_beside(self, pipeline: ReductionPipeline | None, load: ComputeLoad, *, half_units: int) -> float:
        """Returns the seconds of a computation during which bucket 0 is reduced, on the slowest rank.

        The reduction starts after half of the computation.

        pipeline: pipeline that runs the reduction; None: the computation runs alone.
        """
        begin = self._clock()
        load.compute(half_units)
        if pipeline is not None:
            pipeline.submit(0)
        load.compute(half_units)
        if pipeline is not None:
            pipeline.wait()
        return self._seconds(begin)

    def time(self, reducer: BucketReducer, *, repeats: int) -> float:
        """Returns the seconds of one reduction of bucket 0 on the slowest rank.

        repeats: number of consecutive reductions that are timed together.
        """
        begin = self._clock()
        for _ in range(repeats):
            run_to_end([reducer.reduce(0)])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return max(self._seconds(begin) / repeats, 1e-9)

    def _seconds(self, begin: float) -> float:
        """Returns the longest time since `begin` over the ranks. The ranks are synchronized afterwards."""
        end = self._clock()
        seconds, elapsed = self._largest(end - begin, end - self._began)
        self.left_s = self._budget_s - elapsed
        return seconds

    def failed_anywhere(self, error: Exception | None) -> bool:
        failed, elapsed = self._largest(float(error is not None), self._clock() - self._began)
        self.left_s = self._budget_s - elapsed
        return failed > 0

    def elapsed_s(self) -> float:
        return self._largest(self._clock() - self._began)[0]

    def _largest(self, *mine: float) -> list[float]:
        numbers = torch.tensor(mine, dtype=torch.float64)
        self._comm.all_reduce(numbers, op=ReduceOp.MAX)
        return [float(number) for number in numbers]


@final
class _Contest:
    """Measures candidate reductions, size by size, and drops slow ones.

    Methods are collective unless they say otherwise.
    """

    def __init__(
        self,
        running: Sequence[_Running],
        *,
        trials: _Trials,
        device: torch.device,
        notes: list[str],
        floor: LinkFloor | None,
    ) -> None:
        self._active = list(running)
        self._floor = floor
        self._trials = trials
        self._device = device
        self._notes = notes

    def measure(self, num_bytes: int) -> bool:
        """Measures buckets of `num_bytes`. Returns True if there is memory and time for a larger size."""
        if not self._plan(num_bytes):
            return False
        times: dict[Candidate, list[float]] = {one.candidate: [] for one in self._active}
        load, half_units = self._trials.load, 0
        if load is not None:
            half_units = load.half_units(self._least_link_s(num_bytes))
        alone: list[float] = []  # times of the computation without a reduction
        compared = num_bytes >= COMPARED_FROM_BYTES
        stop_at_s = self._trials.left_s * (1 - (SHARE_OF_REST if compared else SHARE_OF_SMALL))
        contenders = self._active
        for number in range(MAX_ROUNDS_COMPARED if compared else MAX_ROUNDS):
            before_s = self._trials.left_s
            if compared and number == ROUNDS_OF_ALL and all(times.values()):
                contenders = self._contenders(times)
                if len(contenders) == 1:
                    break
            if load is not None and self._trials.left_s > 0:
                alone.append(self._trials.time_beside(None, load, half_units=half_units))
            # Alternate, with a different first candidate in each round, so that drift affects all alike.
            for place in range(len(contenders)):
                one = contenders[(place + number) % len(contenders)]
                mine = times[one.candidate]
                if self._trials.left_s > 0 and load is not None:
                    mine.append(self._trials.time_beside(one.pipeline, load, half_units=half_units))
                elif self._trials.left_s > 0:
                    repeats = int(TRIAL_S / mine[0]) if mine else 1
                    mine.append(self._trials.time(one.reducer, repeats=max(1, min(MAX_REPEATS, repeats))))
            round_s = before_s - self._trials.left_s
            if self._trials.left_s - round_s < stop_at_s:
                break
        self._take(num_bytes, self._costs(times, alone, num_bytes))
        return self._trials.left_s > 0

    def _least_link_s(self, num_bytes: int) -> float:
        """Returns the shortest time that a link needs for this size with any candidate, in seconds; 0 if unknown.

        Not collective.
        """
        if self._floor is None:
            return 0.0
        return num_bytes * min(self._floor.seconds_per_byte(one.candidate) for one in self._active)

    def _costs(
        self, times: dict[Candidate, list[float]], alone: Sequence[float], num_bytes: int
    ) -> dict[Candidate, list[float]]:
        """Returns the costs of the candidates at this size, by which they are compared. Not collective.

        times: measured times of each candidate. They are the costs, unless the reductions ran during a computation.

        If two candidates need the same time on the link, the one with the shorter processor time costs less.

        alone: times of the computation without a reduction; empty if the reductions ran without a computation.
        """
        if not alone:
            return times
        load_s = statistics.median_low(alone)
        costs: dict[Candidate, list[float]] = {}
        for candidate, found in times.items():
            link_s = self._floor.seconds_per_byte(candidate) * num_bytes if self._floor is not None else 0.0
            added = [max(seconds - load_s, LEAST_SHARE * seconds) for seconds in found]
            costs[candidate] = [max(seconds, link_s + MEASURED_SHARE * seconds) for seconds in added]
        return costs

    def _contenders(self, times: dict[Candidate, list[float]]) -> list[_Running]:
        """Returns the candidates whose best time is at most `CONTENDS` times the best time of all candidates.

        For each other candidate, keeps only its best time in `times`. Not collective.
        """
        best = min(min(found) for found in times.values())
        contenders = []
        for one in self._active:
            own = min(times[one.candidate])
            if own <= CONTENDS * best:
                contenders.append(one)
            else:
                times[one.candidate] = [own]
        return contenders

    def _take(self, num_bytes: int, times: dict[Candidate, list[float]]) -> None:
        """Records the measured times at one size of buckets. Not collective.

        times: measured times of each candidate at this size; empty for a candidate that was not measured.

        If only one of several candidates was measured, nothing is recorded, except at the first size.
        """
        first = not any(one.measured for one in self._active)
        for one in self._active:
            if first and not times[one.candidate] and one.warm_up_s:
                times[one.candidate].append(one.warm_up_s)
        found = [one for one in self._active if times[one.candidate]]
        if len(found) > 1 or len(found) == len(self._active) or first:
            for one in found:
                # The larger of two times, since a single short time may be chance.
                one.measured.append((num_bytes, statistics.median_high(times[one.candidate])))
        missing = [one.candidate for one in self._active if not one.measured]
        if missing:
            names = ", ".join(f"{candidate.algorithm} with {candidate.wire}" for candidate in missing)
            self._notes.append(f"not measured: {names}: the time was used up before")

    def _plan(self, num_bytes: int) -> bool:
        """Allocates one bucket of `num_bytes` for each candidate.

        At the first size, also reduces the bucket once, to open connections. Returns False if a candidate has not
        enough memory on any rank.
        """
        numel = num_bytes // ELEMENT_BYTES
        flag = numel - 1
        bucket = Bucket(torch.float32, (Slot(0, 0, flag, used_flag=flag, shape=(flag,)),), numel)
        for one in self._active:
            failure: CommunicationError | None = None
            try:
                one.reducer.plan([bucket], device=self._device)
            except CommunicationError as error:
                if error.agreed:
                    raise  # agreed by all ranks: not a lack of memory
                failure = error  # perhaps only on this node: its shared memory is full
            if self._trials.failed_anywhere(failure):
                self._notes.append(
                    f"sizes of {num_bytes} bytes and more were not measured: {one.candidate.algorithm} found no "
                    f"memory for them{f': {failure}' if failure else ' on another node'}"
                )
                return False
            # Always for the first candidate: the time may be used up already, and a choice needs one measurement.
            if not one.measured and (self._trials.left_s > 0 or one is self._active[0]):
                one.warm_up_s = self._trials.time(one.reducer, repeats=1)
        return True

    def drop_slow(self, num_bytes: int) -> None:
        """Drops candidates that are more than twice as slow as the best one. Not collective.

        They must be so slow at this size, at the previous size, and at the largest size by extrapolation: a candidate
        with a large latency may still be the best one for large buckets.
        """
        if num_bytes < COMPARED_FROM_BYTES or any(len(one.measured) < 2 for one in self._active):
            return
        best = [min(one.measured[-back][1] for one in self._active) for back in (1, 2)]
        best_ahead = min(one.fitted_s(LARGEST_BYTES) for one in self._active)
        self._active = [
            one
            for one in self._active
            if any(one.measured[-back][1] <= CLEARLY_SLOWER * best[back - 1] for back in (1, 2))
            or one.fitted_s(LARGEST_BYTES) <= CLEARLY_SLOWER * best_ahead
        ]

    def _light(self, num_bytes: int) -> list[_Running]:
        """Returns the candidates that send at most `CLEARLY_MORE` times the bytes of the one that sends least.

        Returns all candidates if the link's rate is unknown, or if latency exceeds the time for the bytes.
        """
        if self._floor is None:
            return self._active
        sent = {one.candidate: self._floor.seconds_per_byte(one.candidate) for one in self._active}
        least = min(sent.values())
        latency = min(one.measured[0][1] for one in self._active)
        if least * num_bytes < latency:
            return self._active
        return [one for one in self._active if sent[one.candidate] <= CLEARLY_MORE * least]

    def next_size(self, num_bytes: int) -> int | None:
        """Returns the largest next size that the remaining time allows; None if there is none. Not collective.

        The time must suffice for `FEW` candidates, or for all if there are fewer. Candidates for which time or memory
        does not suffice are dropped, the slowest first. The fastest candidates are measured first, in case the time
        runs out.
        """
        for factor in GROWTH:
            size = num_bytes * factor
            active = self._light(size)
            few = min(FEW, len(active))
            ranked = sorted(active, key=lambda one: one.fitted_s(size))
            num_most = few if size >= FEW_FROM_BYTES else len(ranked)
            load_s = max(LEAST_LOAD_S, self._least_link_s(size)) if self._trials.load is not None else 0.0
            needed = list(accumulate(load_s + one.expected_s(size) for one in ranked))
            num_timely = sum(seconds <= self._trials.left_s for seconds in needed)
            if num_timely >= few:
                self._active = ranked[: min(num_most, num_timely)]
                return size
        return None
