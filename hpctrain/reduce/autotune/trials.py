"""Trials: short measurements of the candidate reductions, on the ranks and links of this run.

The size of the buckets grows until the time is used up, and candidates that are clearly slower are dropped. All
decisions use times that are reduced by MAX over the ranks, so that all ranks decide alike.

A trial measures the duration of a reduction that runs by itself, while no rank computes.
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
from hpctrain.reduce.autotune.link_speed import Candidate, LinkFloor, Measurement, TimeBySize
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, run_to_end
from hpctrain.reduce.wire_formats import ELEMENT_BYTES

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

    Raises UsageError on every rank if no candidate can be created.
    """
    trials = _Trials(comm, device=device, clock=clock, budget_s=budget_s)
    notes: list[str] = []
    running: list[_Running] = []
    for candidate in candidates:
        try:
            running.append(_Running(candidate, make(*candidate)))
        except UsageError as error:
            notes.append(f"not measured: {candidate.algorithm} with {candidate.wire}: {error}")
    if not running:
        raise UsageError("none of the reductions is available here: " + "; ".join(notes), agreed=True)
    contest = _Contest(running, trials=trials, device=device, notes=notes, floor=floor)
    num_bytes: int | None = SMALLEST_BYTES
    while num_bytes is not None and num_bytes <= largest_bytes and contest.measure(num_bytes):
        contest.drop_slow(num_bytes)
        num_bytes = contest.next_size(num_bytes)
    for one in running:
        one.reducer.close()
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
    measured: list[tuple[int, float]] = field(default_factory=list)
    warm_up_s: float = 0.0

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
    ) -> None:
        self._comm = comm
        self._device = device
        self._clock = clock
        self._budget_s = budget_s
        self._began = clock()
        self.left_s = budget_s

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
        compared = num_bytes >= COMPARED_FROM_BYTES
        stop_at_s = self._trials.left_s * (1 - (SHARE_OF_REST if compared else SHARE_OF_SMALL))
        contenders = self._active
        for number in range(MAX_ROUNDS_COMPARED if compared else MAX_ROUNDS):
            before_s = self._trials.left_s
            if compared and number == ROUNDS_OF_ALL and all(times.values()):
                contenders = self._contenders(times)
                if len(contenders) == 1:
                    break
            # Alternate, with a different first candidate in each round, so that drift affects all alike.
            for place in range(len(contenders)):
                one = contenders[(place + number) % len(contenders)]
                mine = times[one.candidate]
                if self._trials.left_s > 0:
                    repeats = int(TRIAL_S / mine[0]) if mine else 1
                    mine.append(self._trials.time(one.reducer, repeats=max(1, min(MAX_REPEATS, repeats))))
            round_s = before_s - self._trials.left_s
            if self._trials.left_s - round_s < stop_at_s:
                break
        self._take(num_bytes, times)
        return self._trials.left_s > 0

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
            needed = list(accumulate(one.expected_s(size) for one in ranked))
            num_timely = sum(seconds <= self._trials.left_s for seconds in needed)
            if num_timely >= few:
                self._active = ranked[: min(num_most, num_timely)]
                return size
        return None
