"""Short trials of the ways to reduce, on the ranks and links of this run.

Sizes grow until the time is used up; what is clearly slower is left behind. All decisions are made from numbers
of which every rank has the largest, so that all ranks make the same.
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
from hpctrain.reduce.autotune.cost_model import Candidate, Cost, Measurement
from hpctrain.reduce.autotune.link_bound import LinkFloor
from hpctrain.reduce.contract.bucket_plan import Bucket, Slot
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.contract.polling import run_to_end

# (algorithm, wire) -> a reducer in a message space of its own. Collective. UsageError, the same on every rank,
# where the two cannot be had.
MakeReducer = Callable[[str, str], BucketReducer]

ELEMENT_BYTES = 4  # gradients are float32, whatever the wire makes of them
SMALLEST_BYTES = 1 << 12
LARGEST_BYTES = 1 << 24
GROWTH = (8, 4, 2)  # the next size; smaller steps where the time does not reach for a larger one
MAX_ROUNDS = 5
# Of sizes at which bytes are compared more: after so many rounds only those go on that were nearly as fast as the best.
MAX_ROUNDS_COMPARED = 15
ROUNDS_OF_ALL = 2
CONTENDS = 1.5
# A trial of quick reductions is several of them, as ranks never begin one at the same moment.
TRIAL_S = 5e-4
MAX_REPEATS = 8
# At most this share of what is left of the time goes into more rounds of one size, of a small one less.
SHARE_OF_REST = 0.5
SHARE_OF_SMALL = 0.15
CLEARLY_SLOWER = 2.0
CLEARLY_MORE = 1.3
# Below this size it is latency that is compared, which says little of large sizes.
COMPARED_FROM_BYTES = 1 << 18
# Buckets of several MB for each of many candidates on each of a node's ranks would take its memory.
FEW_FROM_BYTES = 1 << 22
FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, in `seconds` altogether. The same on every rank. notes: what was not, and why."""

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
    """Measure the candidates, about `budget_s` seconds long by the slowest rank's clock. Collective over `comm`.

    A reduction that has begun is never broken off: `budget_s` leaves room for one that takes longer than
    predicted. Reducers are closed at the end. UsageError on every rank if none of the candidates can be made.
    floor: of the links; where bytes decide, what sends clearly more than another is not measured.
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
        raise UsageError("none of the reductions can be made here: " + "; ".join(notes), agreed=True)
    contest = _Contest(running, trials=trials, device=device, notes=notes, floor=floor)
    num_bytes: int | None = SMALLEST_BYTES
    while num_bytes is not None and num_bytes <= largest_bytes and contest.measure(num_bytes):
        contest.leave_behind(num_bytes)
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
    """A candidate in the contest. measured: (bytes, seconds), the same on every rank."""

    candidate: Candidate
    reducer: BucketReducer
    measured: list[tuple[int, float]] = field(default_factory=list)
    warm_up_s: float = 0.0

    def fitted_s(self, num_bytes: int) -> float:
        return Cost.fit(self.measured).at(num_bytes)

    def expected_s(self, num_bytes: int) -> float:
        """What a reduction of a larger size will hardly take longer than."""
        last_bytes, last_s = self.measured[-1]
        at_most = last_s * num_bytes / last_bytes
        by_slope = self.fitted_s(num_bytes)
        # Small sizes are all latency, and say little of larger ones.
        return by_slope if len(self.measured) > 2 else (by_slope + at_most) / 2


@final
class _Trials:
    """Times single trials, and the time that is left. Its methods are collective."""

    def __init__(
        self, comm: Collective, *, device: torch.device, clock: Callable[[], float], budget_s: float
    ) -> None:
        self._comm = comm
        self._device = device
        self._clock = clock
        self._budget_s = budget_s
        self._began = clock()
        self.left_s = budget_s

    def time(self, reducer: BucketReducer, *, repeats: int) -> float:
        """Seconds of one reduction of bucket 0, of the rank that took longest."""
        begin = self._clock()
        for _ in range(repeats):
            run_to_end([reducer.reduce(0)])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end = self._clock()
        # Beside what it tells, this is where the ranks meet before the next trial.
        seconds, elapsed = self._largest(end - begin, end - self._began)
        self.left_s = self._budget_s - elapsed
        return max(seconds / repeats, 1e-9)

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
    """The candidates that are still measured, size by size. Its methods, but for the pure ones, are collective."""

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
        """Measure one size; whether a larger one can be looked at."""
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
            # In turns, another one first in each round: what drifts hits all alike.
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
        """Those whose best time is at most `CONTENDS` times the best of all; of the others it is the one that counts.

        Not collective."""
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
        """What the trials of a size came to. Not collective.

        Who had no turn is left behind; a size at which one alone had its turn compares nothing.
        """
        first = not any(one.measured for one in self._active)
        for one in self._active:
            if first and not times[one.candidate] and one.warm_up_s:
                times[one.candidate].append(one.warm_up_s)
        found = [one for one in self._active if times[one.candidate]]
        if len(found) > 1 or len(found) == len(self._active) or first:
            for one in found:
                # Of two the larger: a time that was short once by luck is no promise.
                one.measured.append((num_bytes, statistics.median_high(times[one.candidate])))
        missing = [one.candidate for one in self._active if not one.measured]
        if missing:
            names = ", ".join(f"{candidate.algorithm} with {candidate.wire}" for candidate in missing)
            self._notes.append(f"not measured: {names}: the time was used up before")

    def _plan(self, num_bytes: int) -> bool:
        """Memory for one bucket, and, at the first size, a first reduction: that is when connections are made."""
        numel = num_bytes // ELEMENT_BYTES
        flag = numel - 1
        bucket = Bucket(torch.float32, (Slot(0, 0, flag, used_flag=flag, shape=(flag,)),), numel)
        for one in self._active:
            failure: CommunicationError | None = None
            try:
                one.reducer.plan([bucket], device=self._device)
            except CommunicationError as error:
                if error.agreed:
                    raise  # known to all ranks: nothing to do with memory
                failure = error  # perhaps of this node alone: no room left in its shared memory
            if self._trials.failed_anywhere(failure):
                self._notes.append(
                    f"sizes of {num_bytes} bytes and more were not measured: {one.candidate.algorithm} found no "
                    f"memory for them{f': {failure}' if failure else ' on another node'}"
                )
                return False
            # The first one in any case: the time may be over when all are made, and a choice needs one.
            if not one.measured and (self._trials.left_s > 0 or one is self._active[0]):
                one.warm_up_s = self._trials.time(one.reducer, repeats=1)
        return True

    def leave_behind(self, num_bytes: int) -> None:
        """Go on without what is twice as slow as the best: now, at the size before, and by its slope. Not collective.

        By its slope, because a large latency says nothing of large buckets.
        """
        if num_bytes < COMPARED_FROM_BYTES:
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
        """Those that send no more than `CLEARLY_MORE` times the least, where bytes take longer than latency."""
        if self._floor is None:
            return self._active
        sent = {one.candidate: self._floor.seconds_per_byte(one.candidate) for one in self._active}
        least = min(sent.values())
        latency = min(one.measured[0][1] for one in self._active)
        if least * num_bytes < latency:
            return self._active
        return [one for one in self._active if sent[one.candidate] <= CLEARLY_MORE * least]

    def next_size(self, num_bytes: int) -> int | None:
        """The largest step for which time and memory reach, or None. Not collective.

        For a few candidates, that is: of more, those that were slowest are left behind. The best come first, so
        that they have had their turn should the time end.
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
