"""Where gradients lie while a step is made: in the buckets, so that nothing is copied twice."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, Slot, sum_dtype
from hpctrain.reduce.data_parallel.gradient_norm import in_rows, square_of


@dataclass(slots=True)
class _Place:
    """Of one parameter. slot: its part of the bucket, through which we write, complex numbers as pairs.

    gradient: the same memory as a tensor for `parameter.grad`. It has a version counter of its own, so that it
    tells a change by the user from ours and the reducer's. None where the parameter's dtype is not the
    bucket's: then `.grad` is another tensor, and the sum is copied into it.
    """

    bucket: int
    slot: torch.Tensor
    gradient: torch.Tensor | None
    is_complex: bool


@final
class GradientMemory:
    """The buckets of one plan and each parameter's place in them. Does not communicate."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        buckets: Sequence[Bucket],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        self._parameters = parameters
        self.buckets = tuple(buckets)
        self.buffers = list(buffers)
        found: dict[int, _Place] = {}
        for number, (bucket, buffer) in enumerate(zip(self.buckets, self.buffers, strict=True)):
            for slot in bucket.slots:
                found[slot.parameter] = _place(parameters[slot.parameter], number, slot, buffer)
        self._places = [found[index] for index in range(len(parameters))]
        self._copied = [index for index, place in enumerate(self._places) if place.gradient is None]
        # What each `.grad` is to be until the step, and its count of in-place changes.
        self._sent: list[tuple[torch.Tensor, int] | None] = [None] * len(parameters)
        pairs = list(zip(self.buckets, self.buffers, strict=True))
        self._gradients = [buffer[: bucket.num_gradients] for bucket, buffer in pairs if bucket.num_gradients]
        self._rows = [rows for gradients in self._gradients for rows in in_rows(gradients)]
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._flags = [buffer[bucket.first_flag :] for bucket, buffer in pairs]
        viewed = [place for place in self._places if place.gradient is not None]
        self._usual_references = max((_references(place) for place in viewed), default=0)

    def put(self, index: int, *, factor: float) -> int:
        """Write the parameter's gradient, times `factor`, into its place; the number of its bucket.

        `.grad` is then a view of the place, where the dtype allows. No gradient counts as zeros.
        """
        parameter, place = self._parameters[index], self._places[index]
        gradient = parameter.grad
        if gradient is None:
            place.slot.zero_()
            return place.bucket
        # In backward each access to a tensor costs a microsecond: its code has left the caches.
        dense = gradient.detach() if gradient.requires_grad else gradient  # as after create_graph=True
        if dense.layout is not torch.strided:
            dense = dense.to_dense()
        if place.is_complex:
            dense = torch.view_as_real(dense.resolve_conj())
        if factor == 1.0:
            place.slot.copy_(dense)
        elif dense.dtype is place.slot.dtype:
            torch.mul(dense, factor, out=place.slot)
        else:
            # Widened first: a product in a half type would be rounded.
            place.slot.copy_(dense).mul_(factor)
        if place.gradient is not None:
            parameter.grad = gradient = place.gradient
        self._sent[index] = (gradient, gradient._version)
        return place.bucket

    def complete(self, number: int) -> None:
        """Everything of bucket `number` was put: write beside it for which parameters there was a gradient."""
        had = [self._sent[slot.parameter] is not None for slot in self.buckets[number].slots]
        flags = self._flags[number]
        if all(had):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(had))

    def check_untouched(self) -> None:
        """UsageError if a `.grad` is not what was put: the change is not on the wire, and would be lost."""
        for parameter, sent in zip(self._parameters, self._sent, strict=True):
            gradient = parameter.grad
            if sent is None:
                same = gradient is None
            else:
                same = gradient is sent[0] and gradient._version == sent[1]
            if not same:
                raise UsageError(
                    "gradients were changed between backward and step(): they are on their way to the other "
                    "ranks by then, and the change would be lost. To clip, give clip_norm= when the updater is "
                    "made"
                )

    def square(self, *, share: int, num_shares: int) -> float:
        """Sum of the squares of a share of the gradients in the buckets; all shares add up to the whole's."""
        mine = [rows.tensor_split(num_shares)[share] for rows in self._rows]
        mine = [rows for rows in mine if rows.numel()]
        if not mine:
            return 0.0
        square = square_of(torch.cat([torch.linalg.vector_norm(rows, dim=1) for rows in mine]))
        if math.isinf(square):  # perhaps only in float32
            norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in mine]
            square = square_of(torch.cat(norms))
        return square

    def scale(self, factor: float) -> None:
        """Multiply all gradients, in place."""
        if factor != 1.0 and self._gradients:
            torch._foreach_mul_(self._gradients, factor)

    def copy_out(self) -> bool:
        """Sums into each `.grad` of another dtype; False if one of them cannot be held there (float16)."""
        finite = []
        for index in self._copied:
            parameter, slot = self._parameters[index], self._places[index].slot
            gradient = parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                parameter.grad = gradient = torch.empty_like(parameter)
            gradient = gradient.detach()
            (torch.view_as_real(gradient) if gradient.is_complex() else gradient).copy_(slot)
            if gradient.dtype is torch.float16:
                finite.append(gradient.isfinite().all())
        return not finite or bool(torch.stack(finite).all())

    def give_out(self) -> None:
        """Each `.grad` as the optimizer is to see it: none where no rank had one."""
        # All flags at once: on a GPU each look at a value waits for the device.
        summed = torch.cat([flags.float() for flags in self._flags]).tolist()
        if 0 not in summed and None not in self._sent:  # as they were put
            return
        for slot, flag in zip(self._slots, summed, strict=True):
            if flag == 0:
                self._parameters[slot.parameter].grad = None
            elif (gradient := self._places[slot.parameter].gradient) is not None:
                self._parameters[slot.parameter].grad = gradient

    def forget(self) -> None:
        """The step is done, and no `.grad` is set: the buckets may be written again.

        A gradient that somebody still holds, as an optimizer may that compares it with the next one, gets
        memory of its own. (Only the tensor itself is noticed, not views of it.)
        """
        self._sent = [None] * len(self._parameters)
        for place in self._places:
            if place.gradient is not None and _references(place) > self._usual_references:
                fresh = place.gradient.data
                place.gradient.data = place.gradient.clone()
                place.gradient = fresh

    def leave(self) -> None:
        """No `.grad` is a view any longer: the buckets' memory may go."""
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if place.gradient is not None and parameter.grad is place.gradient:
                parameter.grad = parameter.grad.clone()
        self.forget()


def describe_gradient(parameter: torch.nn.Parameter) -> GradientSpec:
    """What the plan must know of a parameter's gradient. A complex number counts as two elements."""
    shape = _memory_shape(parameter)
    if parameter.is_complex():
        shape = (*shape, 2)
    numel = parameter.numel() * (2 if parameter.is_complex() else 1)
    return GradientSpec(numel, sum_dtype(parameter.dtype), shape)


def _place(parameter: torch.nn.Parameter, number: int, slot: Slot, buffer: torch.Tensor) -> _Place:
    flat = buffer[slot.offset : slot.offset + slot.numel]
    if parameter.is_complex():
        return _Place(number, flat.view(*parameter.shape, 2), None, True)
    # Laid out as the parameter is: an optimizer walks over both at once.
    order = _memory_order(parameter)
    view = flat.view([parameter.shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(order))]
    )
    gradient = view.data if parameter.dtype is buffer.dtype else None
    return _Place(number, view, gradient, False)


def _memory_order(parameter: torch.Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost; as they are for a layout with holes."""
    dims = list(range(parameter.dim()))
    if parameter.is_contiguous():
        return dims
    strides = parameter.stride()
    order = sorted(dims, key=lambda dim: -strides[dim])
    return order if parameter.permute(order).is_contiguous() else dims


def _memory_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    if parameter.is_complex():
        return tuple(parameter.shape)
    return tuple(parameter.shape[dim] for dim in _memory_order(parameter))


def _references(place: _Place) -> int:
    return sys.getrefcount(place.gradient)
