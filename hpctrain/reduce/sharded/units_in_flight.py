"""The pending operations of the reduction thread: reductions of units, then the gathering of their parameters."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Sequence
from typing import final

import torch

from hpctrain.reduce.contract.polling import LONGEST_WAIT_CROWDED_S, LONGEST_WAIT_S, Backoff
from hpctrain.reduce.contract.updater import ReductionObserver
from hpctrain.reduce.data_parallel.arriving_parameters import Arrivals, can_arrive_late, has_compiled
from hpctrain.reduce.data_parallel.reduction_thread import InFlight, ReductionPipeline
from hpctrain.reduce.sharded.scatter_reducer import ScatterReducer
from hpctrain.reduce.sharded.shard_plan import ShardPlan


@final
class UnitsInFlight:
    """Of one plan, for which the reducer has memory. Every rank begins the same in the same order.

    parameters: of the plan. model: see `can_arrive_late`. max_in_flight, overlap, crowded: as for `AllReduceUpdater`.
    """

    def __init__(
        self,
        reducer: ScatterReducer,
        *,
        plan: ShardPlan,
        parameters: Sequence[torch.nn.Parameter],
        model: torch.nn.Module | None,
        max_in_flight: int,
        overlap: bool,
        crowded: bool,
    ) -> None:
        self._reducer = reducer
        self._plan = plan
        self._overlap = overlap
        self._late = overlap and can_arrive_late(parameters, model=model)
        self._units_of: list[list[int]] = [[] for _ in plan.buckets]
        for number, unit in enumerate(plan.units):
            self._units_of[unit.bucket].append(number)
        self._pipeline = ReductionPipeline(
            self._turns,
            device=torch.device("cpu"),  # of the units' memory
            max_in_flight=max_in_flight,
            overlap=overlap,
            longest_wait_s=LONGEST_WAIT_CROWDED_S if crowded else LONGEST_WAIT_S,
        )
        self._arrivals = Arrivals(
            [[parameters[slot.parameter] for slot in bucket.slots] for bucket in plan.buckets],
            wait_until=self._pipeline.wait_until,
        )
        self._blocked_s = 0.0
        self._earlier = InFlight(0.0, 0.0)  # of waits within backward
        if self._late:  # a process that ends before would leave others waiting for its parameters
            atexit.register(self.wait_for_parameters)

    def units_of(self, bucket: int) -> Sequence[int]:
        return self._units_of[bucket]

    def room_for(self, number: int) -> torch.Tensor:
        """Returns the memory of unit `number`, once what uses it has ended. `reduce` must follow."""
        memory = self._reducer.claim(number)
        if memory is not None:
            return memory
        began = time.perf_counter()
        backoff = Backoff()
        while (memory := self._reducer.claim(number)) is None:
            if self._overlap:
                self._pipeline.check()
                backoff.wait(eager=False)
            else:
                self._earlier = self.wait()
        self._blocked_s += time.perf_counter() - began
        return memory

    def reduce(self, number: int) -> None:
        """Schedules the reduction of unit `number`, whose memory is filled."""
        self._pipeline.submit(number)

    def wait(self) -> InFlight:
        """Waits for all pending operations. Returns the seconds since the last wait with anything in flight."""
        waited, earlier = self._pipeline.wait(), self._earlier
        self._earlier = InFlight(0.0, 0.0)
        return InFlight(earlier.total_s + waited.total_s, earlier.hidden_s + waited.hidden_s)

    def gather(self, buckets: Sequence[int]) -> float:
        """Begins to gather the parameters of all buckets, in this order, after `wait`.

        Waits for them only where their use cannot: without overlap, in scripted models, and once something was
        compiled. Returns the seconds of that wait; the time of operations that are still pending is part of
        what the next `wait` returns.
        """
        began = time.perf_counter()
        late = self._late and not has_compiled()
        for bucket in buckets:
            if late:
                self._arrivals.expect(bucket, num_units=len(self._units_of[bucket]))
            for number in self._units_of[bucket]:
                self._pipeline.submit(len(self._plan.units) + number)
        if late:
            return 0.0
        gathered = self._pipeline.wait()
        self._blocked_s += time.perf_counter() - began
        return gathered.total_s

    def wait_for_parameters(self) -> None:
        """Waits until no parameters are being gathered. Raises the error of that on every rank on which it failed."""
        self._arrivals.wait_for_all()

    def take_blocked_s(self) -> float:
        """Returns the seconds, since the last call, in which training waited for memory or for parameters."""
        seconds, self._blocked_s = self._blocked_s, 0.0
        return seconds + self._arrivals.take_waited_s()

    def observe(self, observer: ReductionObserver | None) -> None:
        """See `DistributedOptimizer.observe_reductions`: of each unit, and the gathering of its parameters under the
        same number."""
        self.wait_for_parameters()
        if observer is None:
            self._pipeline.observer = None
            return
        num_units = len(self._plan.units)
        self._pipeline.observer = lambda number, begin, end: observer(number % num_units, begin, end)

    def close(self) -> bool:
        """Waits for parameters; ends the thread. Returns False if a reduction hangs.

        Raises the error of a gathering, unless it has been raised before.
        """
        atexit.unregister(self.wait_for_parameters)
        try:
            if not self._arrivals.has_failed:
                self.wait_for_parameters()
        finally:
            self._arrivals.give_up()
            ended = self._pipeline.close()
        return ended

    def _turns(self, number: int) -> Iterator[bool]:
        """Returns the reduction of unit `number`, or, beyond the number of units, the gathering of one."""
        num_units = len(self._plan.units)
        if number < num_units:
            return self._reducer.reduce_scatter(number)
        return self._gathering(number - num_units)

    def _gathering(self, number: int) -> Iterator[bool]:
        yield from self._reducer.all_gather(number)
        self._arrivals.arrived(self._plan.units[number].bucket)
