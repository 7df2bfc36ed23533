"""The pending operations of the reduction thread: reductions of units, and the gathering of their parameters.

Parameters are gathered while training continues, and the first operation that uses a parameter waits for it. Until all
parameters of its bucket have arrived, a parameter is of a class for which PyTorch passes every operation to
`__torch_function__`, as for `UninitializedParameter` of lazy modules. So nothing reads a parameter too early: neither a
forward pass, an evaluation or a checkpoint, nor a copy of the model or a user's list of parameters. Only code that
reads the memory without PyTorch's functions does not wait: scripted modules (`can_arrive_late`), pointers, and views
that were created before.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch

from hpctrain.reduce.contract.bucket_reducer import LONGEST_WAIT_OVERSUBSCRIBED_S, LONGEST_WAIT_S, Backoff
from hpctrain.reduce.contract.updater import ReductionObserver
from hpctrain.reduce.data_parallel.reduction_thread import ReductionPipeline, TimeInFlight
from hpctrain.reduce.zero.bucket_division import BucketDivision
from hpctrain.reduce.zero.zero_reducer import ZeroReducer

# Operations that do not read a parameter's elements.
_WITHOUT_ELEMENTS = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("device", "dtype", "grad", "is_leaf", "layout", "ndim", "requires_grad", "shape")
    ),
    torch.Tensor.grad.__set__,  # type: ignore[union-attr]
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.size,
}


class ArrivingParameter(torch.nn.Parameter):
    """A parameter whose new values have not arrived yet. Each bucket has a subclass of its own.

    wait: function that returns when the parameters of the bucket have arrived. They are then of the class
    `torch.nn.Parameter` again.
    """

    wait: ClassVar[Callable[[], None]]

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Returns a plain parameter. `copy.deepcopy` calls this for a copy, after it has waited for the data."""
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _WITHOUT_ELEMENTS:
            return super().__torch_function__(func, types, args, kwargs or {})
        for kind in types:
            if issubclass(kind, ArrivingParameter):
                kind.wait()
        return func(*args, **(kwargs or {}))


@final
class Arrivals:
    """Tracks the buckets whose parameters are being gathered. Only `arrived` may be called from another thread.

    buckets: the parameters of each bucket.
    wait_until: function that waits until the given function returns True, which calls of `arrived` bring about.
    `wait_until` raises the error of a gathering that has failed.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[torch.nn.Parameter]],
        *,
        wait_until: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._buckets = buckets
        self._wait_until = wait_until
        self._missing = [0] * len(buckets)  # units
        self._on_their_way: set[int] = set()
        self._classes = [_class_that_waits(partial(self.wait_for, number)) for number in range(len(buckets))]
        self.has_failed = False  # an error has been raised, by a wait
        self._waited_s = 0.0

    def expect(self, bucket: int, *, num_units: int) -> None:
        """Announces that the parameters of a bucket will arrive in `num_units` pieces.

        A use of one of these parameters waits until all pieces have arrived.
        """
        self._missing[bucket] = num_units
        self._on_their_way.add(bucket)
        for parameter in self._buckets[bucket]:
            parameter.__class__ = self._classes[bucket]

    def arrived(self, bucket: int) -> None:
        """Records that one more unit of the bucket has arrived.

        Any thread may call it. Does nothing if the bucket is not expected.
        """
        if bucket in self._on_their_way:
            self._missing[bucket] -= 1

    def wait_for(self, bucket: int) -> None:
        """Waits until the bucket has arrived. Raises the error of a gathering that has failed."""
        began = time.perf_counter()
        try:
            self._wait_for(bucket)
        finally:
            self._waited_s += time.perf_counter() - began

    def wait_for_all(self) -> None:
        """Waits until no bucket is being gathered. Raises the error of a gathering that has failed."""
        for bucket in list(self._on_their_way):
            self._wait_for(bucket)

    def _wait_for(self, bucket: int) -> None:
        if self._missing[bucket]:
            try:
                self._wait_until(lambda: self._missing[bucket] == 0)
            except BaseException:
                self.has_failed = True
                raise
        self._as_usual(bucket)

    def take_waited_s(self) -> float:
        """Returns the seconds that operations on parameters have waited since the last call."""
        seconds, self._waited_s = self._waited_s, 0.0
        return seconds

    def give_up(self) -> None:
        """Makes all parameters usable with their present values: no more units will arrive, and no use waits."""
        for bucket in list(self._on_their_way):
            self._as_usual(bucket)

    def _as_usual(self, bucket: int) -> None:
        self._on_their_way.discard(bucket)
        for parameter in self._buckets[bucket]:
            if isinstance(parameter, ArrivingParameter):
                parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]  # back to the base


def _class_that_waits(wait: Callable[[], None]) -> type[ArrivingParameter]:
    class Arriving(ArrivingParameter): ...

    Arriving.wait = wait
    return Arriving


def can_arrive_late(parameters: Sequence[torch.nn.Parameter], *, model: torch.nn.Module | None) -> bool:
    """Returns True if every use of a parameter would wait for its arrival.

    Returns False if the model has scripted modules, or if a parameter is not of the class `torch.nn.Parameter`.
    """
    scripted = model is not None and any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
    return not scripted and all(type(parameter) is torch.nn.Parameter for parameter in parameters)


def has_compiled() -> bool:
    """Returns True if `torch.compile` has compiled something in this process.

    Compiled code depends on the class of the parameters, and would be recompiled whenever the class changes.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


# The pending operations of the reduction thread.


@final
class UnitsInFlight:
    """Runs the reductions of a plan's units (elements that are reduced together), and the gathering of parameters.

    Every rank starts the same operations in the same order.

    reducer: reducer that has memory for the plan.
    parameters: parameters of the plan.
    model: see `can_arrive_late`.
    max_in_flight, overlap, oversubscribed: see `AllReduceUpdater`.
    """

    def __init__(
        self,
        reducer: ZeroReducer,
        *,
        plan: BucketDivision,
        parameters: Sequence[torch.nn.Parameter],
        model: torch.nn.Module | None,
        max_in_flight: int,
        overlap: bool,
        oversubscribed: bool,
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
            device=torch.device("cpu"),  # the units' memory is on the host
            max_in_flight=max_in_flight,
            overlap=overlap,
            longest_wait_s=LONGEST_WAIT_OVERSUBSCRIBED_S if oversubscribed else LONGEST_WAIT_S,
        )
        self._arrivals = Arrivals(
            [[parameters[slot.parameter] for slot in bucket.slots] for bucket in plan.buckets],
            wait_until=self._pipeline.wait_until,
        )
        self._blocked_s = 0.0
        self._earlier = TimeInFlight(0.0, 0.0)  # waits within backward
        if self._late:  # a process that exits earlier would leave others waiting for its parameters
            atexit.register(self.wait_for_parameters)

    def units_of(self, bucket: int) -> Sequence[int]:
        return self._units_of[bucket]

    def room_for(self, number: int) -> torch.Tensor:
        """Returns the memory of unit `number`, once no operation uses it any more. A call of `reduce` must follow."""
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
        """Schedules the reduction of unit `number`. Call it after the unit's memory is filled."""
        self._pipeline.submit(number)

    def wait(self) -> TimeInFlight:
        """Waits for all pending operations.

        Returns the seconds since the last wait during which at least one operation was in flight.
        """
        waited, earlier = self._pipeline.wait(), self._earlier
        self._earlier = TimeInFlight(0.0, 0.0)
        return TimeInFlight(earlier.total_s + waited.total_s, earlier.hidden_s + waited.hidden_s)

    def gather(self, buckets: Sequence[int]) -> float:
        """Starts to gather the parameters of all buckets, in this order. Call it after `wait`.

        `gather` waits for the parameters only if code that uses them would not wait: without overlap, if
        `can_arrive_late` is False, and once `torch.compile` has compiled something. In these cases the result is the
        seconds of the gathering. Otherwise the result is 0, and the time of the gathering is part of the result of the
        next `wait`.
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
        """Waits until no parameters are being gathered. Raises the error of a gathering that failed on this rank."""
        self._arrivals.wait_for_all()

    def take_blocked_s(self) -> float:
        """Returns the seconds in which training has waited for memory or for parameters since the last call."""
        seconds, self._blocked_s = self._blocked_s, 0.0
        return seconds + self._arrivals.take_waited_s()

    def observe(self, observer: ReductionObserver | None) -> None:
        """See `ZeroUpdater.observe_reductions`."""
        self.wait_for_parameters()
        if observer is None:
            self._pipeline.observer = None
            return
        num_units = len(self._plan.units)
        self._pipeline.observer = lambda number, begin, end: observer(number % num_units, begin, end)

    def close(self) -> bool:
        """Waits for parameters and ends the thread. Returns False if a reduction hangs.

        Raises the error of a gathering that has failed, unless this error was raised before.
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
        """Returns the operation `number`, as a generator.

        With U units, operation n < U is the reduction of unit n, and operation U + n is the gathering of its
        parameters.
        """
        num_units = len(self._plan.units)
        if number < num_units:
            return self._reducer.reduce_scatter(number)
        return self._gathering(number - num_units)

    def _gathering(self, number: int) -> Iterator[bool]:
        yield from self._reducer.all_gather(number)
        self._arrivals.arrived(self._plan.units[number].bucket)
