"""Parameters that are being gathered while training continues: the first operation that uses one waits for it.

Until its bucket has arrived a parameter is of a class of which PyTorch passes every operation to `__torch_function__`,
as it does with lazy modules' `UninitializedParameter`. So nothing reads it too early: forward, an evaluation, a
checkpoint, a copy of the model, a user's list of parameters. Only what reads its memory without PyTorch's functions
does not wait: scripted modules (`can_arrive_late`), a pointer, a view that was made before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch

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
    """A parameter that has not arrived yet. There is a class for each bucket.

    wait: returns when the bucket has arrived; its parameters are of the class `torch.nn.Parameter` again.
    """

    wait: ClassVar[Callable[[], None]]

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Returns a usual parameter: a copy, for which `copy.deepcopy` asks, has been read from one that arrived."""
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
    """Which buckets' parameters are on their way. Used by one thread, but for `arrived`.

    buckets: the parameters of each. wait_until: waits until a function returns True, which `arrived` makes so; raises
    the error of a gathering that has failed.
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
        """The bucket will arrive in so many units; until then whatever uses its parameters waits."""
        self._missing[bucket] = num_units
        self._on_their_way.add(bucket)
        for parameter in self._buckets[bucket]:
            parameter.__class__ = self._classes[bucket]

    def arrived(self, bucket: int) -> None:
        """One more unit of the bucket is in place. On any thread; does nothing if it is not expected."""
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
        """Waits until no bucket is on its way. Raises the error of a gathering that has failed."""
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
        """Returns the seconds for which operations on parameters have waited since the last call."""
        seconds, self._waited_s = self._waited_s, 0.0
        return seconds

    def give_up(self) -> None:
        """Nothing waits any longer, and nothing will arrive: parameters may be read as they are."""
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
    """Returns False where something might not wait: scripted modules, and parameters of another class already."""
    scripted = model is not None and any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
    return not scripted and all(type(parameter) is torch.nn.Parameter for parameter in parameters)


def has_compiled() -> bool:
    """Returns True if `torch.compile` has compiled something in this process.

    Compiled code would find parameters of another class than before, and be compiled again and again.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
