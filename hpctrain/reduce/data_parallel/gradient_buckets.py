"""Gradients as views of bucket memory during a step, so that no gradient is copied twice."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from hpctrain.distributed import memory_order
from hpctrain.errors import UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, Slot, sum_dtype


@dataclass(slots=True)
class _Place:
    """Place of one parameter. slot: view of its part of the bucket, used for writing; complex numbers as pairs.

    gradient: tensor on the same memory for `parameter.grad`, with a separate version counter, which counts changes by
    the user but not those through `slot` or by the reducer. None if the parameter's dtype is not the bucket's: then
    `.grad` is another tensor, and the sum is copied into it.
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
        # For each parameter the `.grad` that was written, and its version counter then; both must stay until the step.
        self._sent: list[tuple[torch.Tensor, int] | None] = [None] * len(parameters)
        pairs = list(zip(self.buckets, self.buffers, strict=True))
        self._gradients = [buffer[: bucket.num_gradients] for bucket, buffer in pairs if bucket.num_gradients]
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self._flags = [buffer[bucket.first_flag :] for bucket, buffer in pairs]
        self._gaps = [buffer[bucket.num_gradients : bucket.first_flag] for bucket, buffer in pairs]
        viewed = [place for place in self._places if place.gradient is not None]
        self._usual_references = max((_references(place) for place in viewed), default=0)

    def put(self, index: int, *, factor: float) -> int:
        """Writes the parameter's gradient, times `factor`, into its bucket. Returns the number of the bucket.

        Afterwards `.grad` is a view of the bucket if the dtype allows. A missing gradient is written as zeros.
        """
        parameter, place = self._parameters[index], self._places[index]
        gradient = parameter.grad
        if gradient is None:
            place.slot.zero_()
            return place.bucket
        # During backward each tensor operation takes about a microsecond, as its code is no longer in the caches.
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
            # Widen first: a product in a half type would be rounded.
            place.slot.copy_(dense).mul_(factor)
        if place.gradient is not None:
            parameter.grad = gradient = place.gradient
        self._sent[index] = (gradient, gradient._version)
        return place.bucket

    def complete(self, number: int) -> None:
        """Writes the flags of bucket `number`, after `put` of all its parameters: 1 if there was a gradient, else 0."""
        had = [self._sent[slot.parameter] is not None for slot in self.buckets[number].slots]
        flags = self._flags[number]
        if all(had):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(had))

    def check_untouched(self) -> None:
        """Raises UsageError if a `.grad` was changed after `put`: the change would be missing from the sum."""
        for parameter, sent in zip(self._parameters, self._sent, strict=True):
            gradient = parameter.grad
            if sent is None:
                same = gradient is None
            else:
                same = gradient is sent[0] and gradient._version == sent[1]
            if not same:
                raise UsageError(
                    "gradients were changed between backward and step(): their reduction over the ranks has begun "
                    "by then, and the change would be lost. To clip, pass clip_norm= when the updater is "
                    "made"
                )

    def scale(self, factor: float) -> None:
        """Multiplies all gradients by `factor`, in place."""
        if factor != 1.0 and self._gradients:
            torch._foreach_mul_(self._gradients, factor)

    def copy_out(self) -> bool:
        """Copies the sums into each `.grad` of another dtype. Returns False if one overflows there (float16)."""
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
        """Sets each `.grad` for the optimizer: to the sum, or None if no rank had a gradient."""
        # All flags in one copy: on a GPU each read of a value waits for the device.
        summed = torch.cat([flags.float() for flags in self._flags]).tolist()
        if 0 not in summed and None not in self._sent:  # every `.grad` is set already
            return
        for slot, flag in zip(self._slots, summed, strict=True):
            if flag == 0:
                self._parameters[slot.parameter].grad = None
            elif (gradient := self._places[slot.parameter].gradient) is not None:
                self._parameters[slot.parameter].grad = gradient

    def forget(self, *, applied: bool = True) -> None:
        """Ends the step, after every `.grad` was dropped: the buckets may be written again. applied: the step was.

        A gradient that is still referenced elsewhere (an optimizer may compare it with the next one) gets separate
        memory. Only references to the tensor itself are detected, not views of it.
        """
        self._sent = [None] * len(self._parameters)
        if not applied:
            # A codec that scales blocks has made NaN of the gaps' zeros where gradients were not finite.
            for gap in self._gaps:
                gap.zero_()
        for place in self._places:
            if place.gradient is not None and _references(place) > self._usual_references:
                fresh = place.gradient.data
                place.gradient.data = place.gradient.clone()
                place.gradient = fresh

    def leave(self) -> None:
        """Copies each `.grad` that is a view of a bucket, so that the buckets' memory can be freed."""
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if place.gradient is not None and parameter.grad is place.gradient:
                parameter.grad = parameter.grad.clone()
        self.forget()


def describe_gradient(parameter: torch.nn.Parameter) -> GradientSpec:
    """Returns the `GradientSpec` of a parameter. A complex number counts as two elements."""
    shape = _memory_shape(parameter)
    if parameter.is_complex():
        shape = (*shape, 2)
    numel = parameter.numel() * (2 if parameter.is_complex() else 1)
    return GradientSpec(numel, sum_dtype(parameter.dtype), shape)


def _place(parameter: torch.nn.Parameter, number: int, slot: Slot, buffer: torch.Tensor) -> _Place:
    flat = buffer[slot.offset : slot.offset + slot.numel]
    if parameter.is_complex():
        return _Place(number, flat.view(*parameter.shape, 2), None, True)
    # Same memory order as the parameter, since an optimizer iterates over both at once.
    order = memory_order(parameter)
    view = flat.view([parameter.shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(order))]
    )
    gradient = view.data if parameter.dtype is buffer.dtype else None
    return _Place(number, view, gradient, False)


def _memory_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    if parameter.is_complex():
        return tuple(parameter.shape)
    return tuple(parameter.shape[dim] for dim in memory_order(parameter))


def _references(place: _Place) -> int:
    return sys.getrefcount(place.gradient)


def one_device(parameters: Sequence[torch.nn.Parameter]) -> torch.device:
    """Returns the device of all parameters. Raises UsageError if they are on several."""
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise UsageError(
            f"parameters are on {', '.join(devices)}, but a rank trains on one device: move the model to one, or "
            "start one rank per device"
        )
    return parameters[0].device
