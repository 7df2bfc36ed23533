"""Reduces buckets on a separate thread while backward runs, several at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from hpctrain.reduce.contract.bucket_reducer import LONGEST_WAIT_S, SHORTEST_WAIT_S, Backoff
from hpctrain.reduce.contract.updater import ReductionObserver

Reduce = Callable[[int], Iterator[bool]]
# One less than `Collective.start_all_reduce` allows in flight: the numbers at the end of a step are one more sum.
MAX_IN_BACKGROUND = 15


@dataclass(frozen=True, slots=True)
class _Submitted:
    number: int
    filled: torch.cuda.Event | None


class TimeInFlight(NamedTuple):
    """Seconds during which at least one reduction was in flight.

    total_s: all of these seconds.
    hidden_s: the part before `ReductionPipeline.wait` was called, during which training continued.
    """

    total_s: float
    hidden_s: float


@final
class ReductionPipeline:
    """Runs the reductions of buckets, up to `max_in_flight` at the same time, by advancing them in turn.

    Every rank submits the same bucket indices in the same order, and reductions start in that order. Each turn works as
    far as it can without waiting. If no reduction made progress, the thread sleeps: 20 us at first, then longer each
    time, up to `longest_wait_s`. While the training thread blocks in `wait`, the reducing thread spins for a short time
    before it sleeps. An exception in a reduction is raised by the next `wait` and by all later calls of `wait`; all
    other reductions, in flight or submitted later, are dropped.

    On CUDA the thread has a stream of its own. Events make a reduction wait for the stream that filled its bucket, and
    make the stream that calls `wait` wait for the reductions.

    Args:
        reduce: Function that returns the generator of a bucket's reduction, for the index of the bucket; see
            `BucketReducer.reduce`.
        device: Device of the buckets.
        max_in_flight: Maximum number of reductions in flight.
        overlap: True to reduce on a separate thread, from `submit` on; False to reduce in `wait`, on the calling
            thread.
        in_background: Function of the index of a bucket. The function returns True, on every rank, if a thread outside
            Python continues the bucket's reduction: up to 15 such reductions start in `submit` even without `overlap`.
            None: there are no such reductions.
        shortest_wait_s, longest_wait_s: First and longest sleep, in seconds.

    Attributes:
        observer: Function that is called on the reducing thread after each reduction, with the index of the bucket, and
            the start and end in seconds of `time.perf_counter`; None: nothing is called.
    """

    def __init__(
        self,
        reduce: Reduce,
        *,
        device: torch.device,
        max_in_flight: int = 4,
        overlap: bool = True,
        in_background: Callable[[int], bool] | None = None,
        shortest_wait_s: float = SHORTEST_WAIT_S,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self.observer: ReductionObserver | None = None
        self._reduce = reduce
        self._device = device
        self._is_on_gpu = device.type == "cuda"
        self._max_in_flight = max_in_flight
        self._in_background = in_background
        self._shortest_wait_s = shortest_wait_s
        self._longest_wait_s = longest_wait_s
        self._condition = threading.Condition()  # guards all that follows
        self._submitted: deque[_Submitted] = deque()
        self._pending = 0
        self._awaited = False  # True while a thread is blocked in `wait`
        self._closed = False
        self._busy_s = 0.0
        self._error: BaseException | None = None
        self._reduced: torch.cuda.Event | None = None
        self._begun: list[Iterator[bool]] = []  # started in `submit`, if there is no thread
        self._begun_at = 0.0
        self._thread: threading.Thread | None = None
        if overlap:
            self._thread = threading.Thread(target=self._run, name="hpctrain-reduce", daemon=True)
            self._thread.start()

    def submit(self, number: int) -> None:
        """Schedules the reduction of bucket `number`. The reduction has ended when `wait` returns."""
        item = _Submitted(number, filled=self._mark())
        with self._condition:
            self._pending += 1
            if self._begins_at_once(number):
                self._begin(number)
                return
            self._submitted.append(item)
            self._condition.notify_all()

    def wait(self) -> TimeInFlight:
        """Waits until all submitted reductions have ended.

        Returns the seconds during which at least one reduction was in flight.
        """
        waits_since = time.perf_counter()
        if self._thread is None and self._has_work():
            self._awaited = True
            self._run_once()
        with self._condition:
            self._awaited = True
            self._condition.wait_for(lambda: self._pending == 0)
            self._awaited = False
            busy_s, self._busy_s = self._busy_s, 0.0
            error = self._error
            reduced, self._reduced = self._reduced, None
        if error is not None:
            raise error
        if reduced is not None:
            torch.cuda.current_stream(self._device).wait_event(reduced)
        return TimeInFlight(busy_s, max(0.0, busy_s - (time.perf_counter() - waits_since)))

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Waits until `done()` returns True, while reductions continue. Only with `overlap`.

        `done()` is called again only when a reduction ends, so the end of a reduction must be what makes `done()`
        return True. Raises the exception of a reduction that has failed.
        """
        with self._condition:
            self._awaited = True
            try:
                self._condition.wait_for(lambda: self._error is not None or done())
            finally:
                self._awaited = False
        self.check()

    def check(self) -> None:
        """Raises the exception of a reduction that has failed, if any. Does not wait."""
        with self._condition:
            error = self._error
        if error is not None:
            raise error

    def close(self) -> bool:
        """Ends the thread. Returns False if a reduction hangs; the bucket of that reduction may then still change."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout=1.0)
        return not self._thread.is_alive()

    def _begins_at_once(self, number: int) -> bool:
        """Returns True if the reduction of `number` starts in `submit`.

        It can do so only if all earlier reductions have started, since reductions start in order.
        """
        return (
            self._thread is None
            and self._error is None
            and not self._submitted
            and len(self._begun) < MAX_IN_BACKGROUND
            and self._in_background is not None
            and self._in_background(number)
        )

    def _begin(self, number: int) -> None:
        if not self._begun:
            self._begun_at = time.perf_counter()
        reduction = self._reduction(number)
        self._begun.append(reduction)
        try:
            next(reduction)
        except StopIteration:  # it ended at once; `_work_off` handles that
            pass
        except BaseException as found:
            self._error = found

    def _reduction(self, number: int) -> Iterator[bool]:
        return self._reduce(number) if self.observer is None else self._observed(number, self.observer)

    def _observed(self, number: int, observer: ReductionObserver) -> Iterator[bool]:
        began = time.perf_counter()
        yield from self._reduce(number)
        observer(number, began, time.perf_counter())

    def _mark(self) -> torch.cuda.Event | None:
        """Returns an event at the current end of the calling thread's stream; None for buckets in host memory."""
        if not self._is_on_gpu:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        if self._is_on_gpu:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))
        while self._await_work():
            self._run_once()

    def _run_once(self) -> None:
        started = self._begun_at if self._begun else time.perf_counter()
        error: BaseException | None = None
        try:
            self._work_off()
        except BaseException as found:
            error = found
        with self._condition:
            self._busy_s += time.perf_counter() - started
            self._error = self._error or error
            if self._error is not None:
                self._submitted.clear()
                self._pending = 0
            else:
                self._pending -= self._done
            self._condition.notify_all()

    def _await_work(self) -> bool:
        with self._condition:
            while True:
                self._condition.wait_for(lambda: self._submitted or self._closed)
                if self._closed:
                    return False
                if self._has_work():
                    return True
                self._condition.notify_all()

    def _has_work(self) -> bool:
        """Returns True if any reduction remains. After an error, drops all submitted reductions and returns False."""
        with self._condition:
            if self._error is not None:
                _end(self._begun)
                self._submitted.clear()
                self._pending = 0
            return bool(self._begun or self._submitted)

    def _work_off(self) -> None:
        """Runs until no reduction is in flight or submitted. `_done` counts the reductions that have ended."""
        self._done = 0
        in_flight, self._begun = self._begun, []
        backoff = Backoff(shortest_wait_s=self._shortest_wait_s, longest_wait_s=self._longest_wait_s)
        try:
            while self._take_up(in_flight) or in_flight:
                if self._one_turn(in_flight):
                    backoff.reset()
                elif in_flight:
                    with self._condition:
                        if not (self._submitted and len(in_flight) < self._max_in_flight):
                            backoff.wait(self._condition.wait, eager=self._awaited)
                if self._closed:
                    return
        finally:
            _end(in_flight)
        with self._condition:
            self._reduced = self._mark()

    def _take_up(self, in_flight: list[Iterator[bool]]) -> bool:
        """Starts submitted reductions until `max_in_flight` are in flight. Returns True if it started any."""
        with self._condition:
            num_free = max(0, self._max_in_flight - len(in_flight))
            items = [self._submitted.popleft() for _ in range(min(num_free, len(self._submitted)))]
        for item in items:
            if item.filled is not None:
                torch.cuda.current_stream(self._device).wait_event(item.filled)
            in_flight.append(self._reduction(item.number))
        return bool(items)

    def _one_turn(self, in_flight: list[Iterator[bool]]) -> bool:
        """Advances each reduction once, the oldest first. Returns True if any reduction made progress."""
        progressed = False
        for reduction in list(in_flight):
            try:
                progressed |= next(reduction)
            except StopIteration:
                in_flight.remove(reduction)
                self._done += 1
                progressed = True
                with self._condition:  # for `wait_until`
                    self._condition.notify_all()
        return progressed


def _end(reductions: list[Iterator[bool]]) -> None:
    """Closes all of these generators and empties the list."""
    for reduction in reductions:
        getattr(reduction, "close", lambda: None)()
    reductions.clear()
