"""The parts of the parameters that a rank owns: the rank sums their gradients, and its optimizer updates them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import final

import torch

from hpctrain.distributed import (
    element_shard,
    flat_view,
    forget_elements,
    hold_elements,
    is_dense,
    memory_order,
)
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.step_end import square_of_all
from hpctrain.reduce.contract.updater import check_optimizer
from hpctrain.reduce.data_parallel.gradient_memory import NOT_READABLE_SHARDED, PendingGradient
from hpctrain.reduce.data_parallel.one_pass import OptimizerStep
from hpctrain.reduce.zero.bucket_division import BucketDivision, ParameterSpan
from hpctrain.reduce.zero.zero_reducer import Gathered


@final
class OwnedParts:
    """Replaces each parameter of the optimizer by this rank's part of the parameter, until `release`.

    optimizer_step: makes the steps of `optimizer`.
    copied: True if the parts have memory of their own, which steps of the optimizer change instead of the model's.
    gradients: for each bucket, the tensor that receives this rank's share of the summed gradients: shape (share,),
    zeroed, in host memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        *,
        plan: BucketDivision,
        rank: int,
        optimizer_step: OptimizerStep,
        copied: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._optimizer_step = optimizer_step
        self._parameters = parameters
        self.gradients = [
            torch.zeros(shares[rank].numel, dtype=bucket.dtype)
            for bucket, shares in zip(plan.buckets, plan.shares, strict=True)
        ]
        self._views: dict[int, torch.Tensor] = {}
        ranges = {}
        for sums, spans in zip(self.gradients, plan.owned_by(rank), strict=True):
            for span in spans:
                ranges[span.parameter] = (span.begin, span.begin + span.numel)
                self._views[span.parameter] = sums[span.place : span.place + span.numel]
        self.parts = []
        for index, parameter in enumerate(parameters):
            begin, end = ranges.get(index, (0, 0))
            self.parts.append(hold_elements(parameter, begin=begin, end=end, copied=copied).part)
            if index in self._views:
                self._views[index] = self._views[index].view(self.parts[index].shape).data
        self._usual_references = max(map(self._references, self._views), default=0)
        self._checked = False
        self._split_state()
        self._replace({id(p): part for p, part in zip(parameters, self.parts, strict=True)})

    def square(self) -> float:
        """Returns the sum of the squares of the summed gradients; infinite or NaN if a gradient is infinite or NaN."""
        return square_of_all(self.gradients)

    def scale_copied(self, factor: float) -> float:
        """Multiplies the summed gradients by `factor` if `set_gradients` will copy some of them.

        Returns the factor that remains for `step`.
        """
        pairs = ((self.parts[index], view) for index, view in self._views.items())
        if all(part.dtype is view.dtype and part.device == view.device for part, view in pairs):
            return factor
        self._scale(factor)
        return 1.0

    def _scale(self, factor: float) -> None:
        filled = [sums for sums in self.gradients if sums.numel()]
        if factor != 1.0 and filled:
            torch._foreach_mul_(filled, factor)

    def set_gradients(self, used: Sequence[bool]) -> bool:
        """Sets each part's `.grad` to the sum, in the part's dtype, or to None if no rank used the parameter.

        Returns False if a sum overflows in the part's dtype (float16).

        used: for each parameter, True if any rank used the parameter.
        """
        finite = True
        for index, view in self._views.items():
            part = self.parts[index]
            if not used[index]:
                part.grad = None
            elif part.dtype is view.dtype and part.device == view.device:
                part.grad = view
            else:
                part.grad = view.to(device=part.device, dtype=part.dtype)
                if part.dtype is torch.float16:
                    finite = finite and bool(part.grad.isfinite().all())
        return finite

    @property
    def may_overflow(self) -> bool:
        """True if a finite sum may overflow in the dtype of its parameter (float16); the same on every rank."""
        return any(parameter.dtype is torch.float16 for parameter in self._parameters)

    def step(self, factor: float) -> None:
        """Steps the optimizer on the parts, with their gradients times `factor`.

        Raises UsageError if the optimizer keeps other state than single values and tensors of a parameter's shape.
        """
        self._optimizer_step.step(factor, scale=self._scale)
        if not self._checked:
            self._check_state()
            self._checked = True

    def forget(self) -> None:
        """Drops the gradients of the parts.

        A gradient that is still referenced elsewhere (an optimizer may keep it) gets memory of its own.
        """
        for part in self.parts:
            part.grad = None
        for index in self._views:
            if self._references(index) > self._usual_references:
                view = self._views[index]
                fresh = view.data
                view.data = view.clone()
                self._views[index] = fresh

    def release(self) -> None:
        """Gives the optimizer the whole parameters back, without the state of the parts."""
        for part, parameter in zip(self.parts, self._parameters, strict=True):
            self._optimizer.state.pop(part, None)
            forget_elements(parameter)
        self._replace({id(part): p for part, p in zip(self.parts, self._parameters, strict=True)})

    def _replace(self, by_id: dict[int, torch.nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [by_id.get(id(parameter), parameter) for parameter in group["params"]]

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._views[index])

    def _split_state(self) -> None:
        """Replaces the state that the optimizer already has for whole parameters by this rank's part of that state.

        Adagrad, for example, has state before its first step.
        """
        for part, parameter in zip(self.parts, self._parameters, strict=True):
            shard, state = element_shard(parameter), self._optimizer.state.pop(parameter, None)
            if state is not None and shard is not None and part.numel():
                self._optimizer.state[part] = {
                    key: shard.cut_whole(value)
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                    else value
                    for key, value in state.items()
                }

    def _check_state(self) -> None:
        for part in self.parts:
            for key, value in _leaves(self._optimizer.state.get(part, {})):
                if value is None or (
                    isinstance(value, torch.Tensor) and (value.shape == part.shape or value.numel() == 1)
                ):
                    continue
                found = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
                raise UsageError(
                    f"{type(self._optimizer).__name__} keeps {key!r} {found:.60} for {part.numel()} elements of a "
                    "parameter: its state cannot be sharded. Use an optimizer that updates each element by itself, "
                    "such as AdamW, or leave shard out"
                )


def check_zero_optimizer(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raises UsageError unless a rank can update its own part of the parameters without the parts of other ranks."""
    check_optimizer(optimizer, layout="optimizer")
    for parameter in parameters:
        if parameter.is_complex():
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} is complex, which a sharded optimizer does not split: "
                "hold its real and imaginary parts, or leave shard out"
            )
        if not is_dense(parameter):
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} has gaps in memory (strides {parameter.stride()}): "
                "make it with .contiguous(), or leave shard out"
            )


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


@final
class ParameterCopies:
    """Copies gradients and parameters between the model and the memory of units. Does not communicate.

    A unit consists of the elements that one reduction sums.

    parameters: the parameters of the plan. Their memory must have no gaps.
    plan: division of the buckets over the ranks.
    rank: index of this rank in the division.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, plan: BucketDivision, rank: int) -> None:
        self._parameters = parameters
        self._flats = [flat_view(parameter) for parameter in parameters]
        self._units = plan.units
        self._packed = [unit.joined() for unit in plan.units]
        self._rank = rank
        self._pending = [PendingGradient(p, words=NOT_READABLE_SHARDED) for p in parameters]
        self._held: dict[int, torch.Tensor] = {}

    def in_place(self) -> bool:
        """Returns True if no parameter was moved to other memory since this object was created."""
        return all(
            parameter.data_ptr() == flat.data_ptr()
            for parameter, flat in zip(self._parameters, self._flats, strict=True)
        )

    def hold(self, index: int) -> None:
        """Keeps a parameter's gradient until `take_gradients`, and replaces `.grad` by a placeholder."""
        gradient = self._parameters[index].grad
        if gradient is not None:
            self._held[index] = gradient
            self._parameters[index].grad = self._pending[index]

    def drop_held(self) -> None:
        """Drops the gradients that `hold` keeps."""
        self._held.clear()

    def any_is_pending(self) -> bool:
        """Returns True if any parameter's `.grad` is still the placeholder that `hold` has set."""
        return any(p.grad is pending for p, pending in zip(self._parameters, self._pending, strict=True))

    def is_as_left(self, index: int, *, had: bool) -> bool:
        """Returns True if the script has not changed a parameter's `.grad` since `hold`.

        had: True if the parameter had a gradient when `hold` was called.
        """
        return self._parameters[index].grad is (self._pending[index] if had else None)

    def take_gradients(self, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """Returns the gradients of these parameters by index, flattened in memory order, shape (n,).

        Parameters without a gradient are left out.
        """
        found = {}
        for index in indices:
            gradient = self._held.pop(index, self._parameters[index].grad)
            if gradient is not None:
                dense = gradient.detach()
                if dense.layout is not torch.strided:
                    dense = dense.to_dense()
                found[index] = dense.permute(memory_order(self._parameters[index])).reshape(-1)
        return found

    def pack(
        self, number: int, gradients: Mapping[int, torch.Tensor], *, factor: float, into: torch.Tensor
    ) -> None:
        """Writes the gradients of unit `number`, times `factor`, into `into`, shape (unit.numel,).

        gradients: result of `take_gradients`. A missing gradient is written as zeros.
        """
        for span in self._packed[number]:
            place = into[span.place : span.place + span.numel]
            gradient = gradients.get(span.parameter)
            if gradient is None:
                place.zero_()
                continue
            values = gradient[span.begin : span.begin + span.numel]
            if factor == 1.0:
                place.copy_(values)
            elif values.dtype is place.dtype and values.device == place.device:
                torch.mul(values, factor, out=place)
            else:
                # Widen first: a product in a half type would be rounded.
                place.copy_(values).mul_(factor)

    def gathered(self, number: int) -> Gathered:
        """Returns the functions that gather the parameters of unit `number`, each in its own dtype."""
        spans = self._units[number].spans
        return Gathered(
            num_bytes=[sum(map(self._bytes_of, of_rank)) for of_rank in spans],
            read=partial(self._read, spans[self._rank]),
            write=partial(self._write, spans),
        )

    def _bytes_of(self, span: ParameterSpan) -> int:
        return span.numel * self._flats[span.parameter].element_size()

    def _bytes(self, span: ParameterSpan) -> torch.Tensor:
        return self._flats[span.parameter][span.begin : span.begin + span.numel].view(torch.uint8)

    def _read(self, spans: Sequence[ParameterSpan], out: torch.Tensor) -> None:
        for span, part in zip(spans, out.split([self._bytes_of(span) for span in spans]), strict=True):
            part.copy_(self._bytes(span))

    def _write(self, spans: Sequence[Sequence[ParameterSpan]], owner: int, data: torch.Tensor) -> None:
        of_owner = spans[owner]
        sizes = [self._bytes_of(span) for span in of_owner]
        for span, part in zip(of_owner, data.split(sizes), strict=True):
            self._bytes(span).copy_(part)
