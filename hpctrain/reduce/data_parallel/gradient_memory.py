"""Gradients in bucket memory: the gradients of a step are summed in the buckets, where the optimizer reads the sums.

From backward until the sums are complete, `.grad` is a placeholder (`PendingGradient`), and every use of the
placeholder is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, final

import torch

from hpctrain.distributed import memory_order
from hpctrain.errors import BackwardRanTwice, GradientsInUse, UsageError
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, Slot, sum_dtype

_BEING_SUMMED = (
    "gradients were read or changed between backward and step(): their sum over the ranks has begun by then, and a "
    "change would be lost. "
)
NOT_READABLE = _BEING_SUMMED + (
    "To clip, pass clip_norm= when the updater is made. To read or change the summed gradients, call "
    "updater.synchronize() on every rank after backward. To update the parameters call updater.step(), not the "
    "optimizer's; to drop the gradients call updater.zero_grad()"
)
_TO_CLIP_SHARDED = (
    "To clip, pass clip_norm= when the updater is made. To update the parameters call updater.step(), not the "
    "optimizer's; to drop the gradients call updater.zero_grad()"
)
NOT_READABLE_SHARDED = _BEING_SUMMED + "Each rank gets the sum of its part only. " + _TO_CLIP_SHARDED
NOT_READABLE_SPLIT = (
    "gradients of a model that is split over the ranks were read or changed between backward and step(): a rank has "
    "those of its own samples and layers alone, and step() sums them. "
) + _TO_CLIP_SHARDED
RAN_TWICE = (
    "backward ran twice before step(): the first gradients are being summed already. Add up the losses and call "
    "backward once: (loss_of_real + loss_of_made).backward(); or wrap all but the last backward of a step in "
    "`with updater.no_sync():`. If this updater makes no step after the first backward, which only passes "
    "through its model (as a generator's through the discriminator), wrap that one, or drop its gradients by "
    "updater.zero_grad() before the next backward"
)
RAN_TWICE_IN_CHECKPOINT = (
    "a block under reentrant activation checkpointing is used more than once in a step: its parameters get a gradient "
    "for each use, and the first is being summed already. Call torch.utils.checkpoint.checkpoint(..., "
    "use_reentrant=False), or run the backward in `with updater.no_sync():`, whose gradients step() sums"
)
_NO_NUMPY = ("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage")


@final
class PendingGradient(torch.Tensor):
    """Placeholder for `.grad` while a gradient is being summed: a tensor without memory. Every use is an error.

    So nothing can change a gradient whose sum has started, or read a half-summed gradient: neither a numpy view, nor
    operations that do not increase the tensor's version counter (GradScaler, fused optimizers, `.data`). PyTorch passes
    each operation on a tensor of this class to `__torch_dispatch__`, including operations of autograd and on lists of
    tensors (`torch._foreach_*`).

    The placeholder has the shape, strides, dtype and device of `parameter`.

    words: error message for a use of the placeholder.
    twice: error message for a second backward; None: the message of `ran_twice`.
    held: gradient to which a further backward adds; None: a further backward is an error.
    """

    words: str
    twice: str | None
    held: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, parameter: torch.Tensor, *, words: str = NOT_READABLE, twice: str | None = None
    ) -> PendingGradient:
        made = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.words, made.twice, made.held = words, twice, None
        return made

    def __init__(
        self, parameter: torch.Tensor, *, words: str = NOT_READABLE, twice: str | None = None
    ) -> None: ...

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        added = func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
        tensors = [*args, *(value for value in args if isinstance(value, list | tuple) for value in value)]
        pending = next((value for value in tensors if isinstance(value, cls)), None)
        if added and torch._C._current_graph_task_id() != -1:  # backward accumulates into `.grad`
            if pending is not None and pending is args[0] and pending.held is not None:
                return pending.add_to_held(args[1], in_place=func is torch.ops.aten.add_.Tensor)
            raise ran_twice() if pending is None or pending.twice is None else BackwardRanTwice(pending.twice)
        raise GradientsInUse(NOT_READABLE if pending is None else pending.words)

    def add_to_held(self, gradient: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        """Adds a gradient to `held`, as backward adds it to `.grad`. Returns the new `.grad`.

        If the addition is in place, the new `.grad` is this placeholder. Otherwise the new `.grad` is the sum, and
        `held` is then None.
        """
        assert self.held is not None
        if in_place:
            self.held.add_(gradient)
            return self
        held, self.held = self.held, None
        return held + gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of shape {tuple(self.shape)} that is being summed over the ranks>"


def ran_twice() -> BackwardRanTwice:
    """Returns the error for a second gradient of a parameter in one step.

    The message differs within reentrant activation checkpointing.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and Path(code.co_filename).match("torch/utils/checkpoint.py"):
            return BackwardRanTwice(RAN_TWICE_IN_CHECKPOINT)
        frame = frame.f_back
    return BackwardRanTwice(RAN_TWICE)


def asks_for_gradients(caller: FrameType) -> bool:
    """Returns True if the calling code is torch's GradScaler, which divides gradients of `param_groups` in place."""
    return str(caller.f_globals.get("__name__", "")).endswith("grad_scaler")


def refuse_grad_scaler(caller: FrameType) -> None:
    """Raises UsageError if a GradScaler reads the parameter groups of an updater.

    Only for updaters of models whose gradients no rank holds as a whole.
    """
    if asks_for_gradients(caller):
        raise UsageError(
            "a GradScaler was given an updater of a sharded or split model: each rank has a part of the gradients, so "
            "that an overflow would be found on some ranks only. Leave the GradScaler out: pass "
            "loss_scale=hpctrain.reduce.LossScale(value=2.0**16, dynamic=True) when the updater is made and call "
            "updater.backward(loss, weight=...), which scales the loss, leaves out steps that overflow on all ranks, "
            "and adapts the scale"
        )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: PendingGradient, *_: Any, **__: Any) -> NoReturn:
        raise GradientsInUse(self.words)

    refuse.__name__ = name
    return refuse


for _name in _NO_NUMPY:
    setattr(PendingGradient, _name, _refusing(_name))


# Gradients in bucket memory during a step.


@dataclass(slots=True)
class _Place:
    """The place of one parameter's gradient in the buckets.

    bucket: index of the bucket.
    slot: view of the gradient's part of the bucket, for writing; a complex number is a pair of real numbers.
    gradient: tensor on the same memory, used as `parameter.grad` once the sum is complete. None if the dtypes of
    parameter and bucket differ: then the sum is copied into another tensor, which becomes `.grad`.
    """

    bucket: int
    slot: torch.Tensor
    gradient: torch.Tensor | None
    is_complex: bool


@final
class GradientMemory:
    """The buckets of one plan, and each parameter's place in them. Does not communicate.

    pending: each parameter with the placeholder that its `.grad` is from `put` until the sum is complete.
    """

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
        self.pending = [(parameter, PendingGradient(parameter)) for parameter in parameters]
        self._had = [False] * len(parameters)  # whether there was a gradient
        # For parameters whose dtype is not the bucket's: their own gradient, which is memory for the sum.
        self._own: dict[int, torch.Tensor] = {}
        pairs = list(zip(self.buckets, self.buffers, strict=True))
        self._gradients = [buffer[: bucket.num_gradients] for bucket, buffer in pairs if bucket.num_gradients]
        self._slots = [slot for bucket in self.buckets for slot in bucket.slots]
        flags = [buffer[bucket.first_flag :] for bucket, buffer in pairs]
        # In host memory as arrays of numpy, with which an operation on a few numbers takes a tenth of the time.
        self._flags = [
            of_bucket.numpy() if of_bucket.device.type == "cpu" else of_bucket for of_bucket in flags
        ]
        self._gaps = [buffer[bucket.num_gradients : bucket.first_flag] for bucket, buffer in pairs]
        viewed = [place for place in self._places if place.gradient is not None]
        self._usual_references = max((_references(place) for place in viewed), default=0)

    def put(self, index: int, *, factor: float) -> int:
        """Writes the parameter's gradient, times `factor`, into its bucket. Returns the index of the bucket.

        Afterwards `.grad` cannot be used until `set_gradients`. A missing gradient is written as zeros.
        """
        parameter, place = self._parameters[index], self._places[index]
        gradient = parameter.grad
        if gradient is None:
            return self.put_zeros(index)
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
        if place.gradient is None:
            self._own[index] = gradient
        parameter.grad = self.pending[index][1]
        self._had[index] = True
        return place.bucket

    def put_zeros(self, index: int) -> int:
        """Writes zeros for a parameter without a gradient. Returns the index of the bucket."""
        place = self._places[index]
        place.slot.zero_()
        return place.bucket

    def any_is_pending(self) -> bool:
        """Returns True if any parameter's `.grad` is still the placeholder that `put` has set."""
        return any(parameter.grad is pending for parameter, pending in self.pending)

    def any_is_given(self) -> bool:
        """Returns True if any parameter's `.grad` is the sum that `set_gradients` has set."""
        return any(p.grad is not None and p.grad is self._sum_of(i) for i, p in enumerate(self._parameters))

    def complete(self, number: int) -> None:
        """Writes the flags of bucket `number`: 1 for each parameter with a gradient, otherwise 0.

        Call it after `put` was called for all parameters of the bucket.
        """
        had = [self._had[slot.parameter] for slot in self.buckets[number].slots]
        flags = self._flags[number]
        if isinstance(flags, torch.Tensor):
            flags.copy_(torch.tensor(had))
        elif all(had):
            flags.fill(1)
        else:
            flags[:] = had

    def check_untouched(self) -> None:
        """Raises GradientsInUse if the script replaced a `.grad` after `put`: the new value would not be summed."""
        for (parameter, pending), had in zip(self.pending, self._had, strict=True):
            if parameter.grad is not (pending if had else None):
                raise GradientsInUse(NOT_READABLE)

    def take_changes(self) -> None:
        """Copies the gradients that the script has replaced after `set_gradients` into the buckets.

        Where `.grad` is None, zeros are written.
        """
        for parameter, place in zip(self._parameters, self._places, strict=True):
            gradient = parameter.grad
            if gradient is None:
                place.slot.zero_()
            elif gradient is not place.gradient:
                dense = gradient.detach()
                if dense.layout is not torch.strided:
                    dense = dense.to_dense()
                place.slot.copy_(torch.view_as_real(dense.resolve_conj()) if place.is_complex else dense)

    def scale(self, factor: float) -> None:
        """Multiplies all gradients by `factor`, in place."""
        if factor != 1.0 and self._gradients:
            torch._foreach_mul_(self._gradients, factor)

    @property
    def has_copies(self) -> bool:
        """True if the dtype of a parameter is not that of its bucket, so that `copy_out` copies its sum."""
        return bool(self._copied)

    def copy_out(self) -> bool:
        """Copies the sum of each parameter whose dtype is not its bucket's into a tensor of the parameter's dtype.

        Returns False if a sum overflows in that dtype (float16).
        """
        finite = []
        for index in self._copied:
            parameter, slot = self._parameters[index], self._places[index].slot
            gradient = self._own.get(index)
            if gradient is None or gradient.layout is not torch.strided:
                gradient = torch.empty_like(parameter)
            self._own[index] = gradient = gradient.detach()
            (torch.view_as_real(gradient) if gradient.is_complex() else gradient).copy_(slot)
            if gradient.dtype is torch.float16:
                finite.append(gradient.isfinite().all())
        return not finite or bool(torch.stack(finite).all())

    def set_gradients(self) -> None:
        """Sets each `.grad` to the sum, or to None if no rank had a gradient. Call it after `copy_out`."""
        summed: list[float] = []
        on_device = [flags.float() for flags in self._flags if isinstance(flags, torch.Tensor)]
        if on_device:
            summed = torch.cat(on_device).tolist()  # one copy: each read of a value waits for the device
        else:
            for flags in self._flags:
                summed += flags.tolist()
        for slot, flag in zip(self._slots, summed, strict=True):
            index = slot.parameter
            gradient = self._places[index].gradient if flag else None
            self._parameters[index].grad = (
                gradient if gradient is not None or not flag else self._own.get(index)
            )

    def set_changed_gradients(self) -> None:
        """Sets each `.grad` that is not None to the memory into which `take_changes` has copied it.

        Call it after `copy_out`.
        """
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                parameter.grad = self._sum_of(index)

    def _sum_of(self, index: int) -> torch.Tensor | None:
        place = self._places[index]
        return place.gradient if place.gradient is not None else self._own.get(index)

    def forget(self, *, applied: bool = True) -> None:
        """Ends the step: the buckets may be written again. Call it after every `.grad` was dropped.

        A gradient that is still referenced elsewhere (an optimizer may compare it with the next gradient) gets memory
        outside of the bucket. References to views of the gradient are not detected.

        applied: True if the step was applied.
        """
        self._had = [False] * len(self._parameters)
        self._own.clear()
        if not applied:
            # If gradients were not finite, a codec that scales blocks has turned the gaps' zeros into NaN.
            for gap in self._gaps:
                gap.zero_()
        for place in self._places:
            if place.gradient is not None and sys.getrefcount(place.gradient) > self._usual_references:
                fresh = place.gradient.data
                place.gradient.data = place.gradient.clone()
                place.gradient = fresh

    def release(self) -> None:
        """Gives each parameter a copy of its gradient in the bucket, so that the bucket's memory can be freed."""
        for (parameter, pending), place in zip(self.pending, self._places, strict=True):
            given = place.gradient is not None and parameter.grad is place.gradient
            if given or parameter.grad is pending:
                gradient = torch.empty_like(parameter.detach())
                (torch.view_as_real(gradient) if place.is_complex else gradient).copy_(place.slot)
                parameter.grad = gradient
        self.forget()


def describe_gradient(parameter: torch.nn.Parameter) -> GradientSpec:
    """Returns the `GradientSpec` of a parameter. A complex number counts as two elements."""
    shape = _memory_shape(parameter)
    if parameter.is_complex():
        shape = (*shape, 2)
    numel = parameter.numel() * (2 if parameter.is_complex() else 1)
    return GradientSpec(numel, sum_dtype(parameter.dtype), shape)


def _place(parameter: torch.nn.Parameter, number: int, slot: Slot, buffer: torch.Tensor) -> _Place:
    view = slot_view(parameter, slot, buffer)
    gradient = view.data if parameter.dtype is buffer.dtype else None
    return _Place(number, view, gradient, parameter.is_complex())


def slot_view(parameter: torch.Tensor, slot: Slot, buffer: torch.Tensor) -> torch.Tensor:
    """Returns a view of a parameter's part of a bucket, with the parameter's shape.

    Of a complex parameter, the view has the shape of `torch.view_as_real`. The view has the memory order of the
    parameter, since an optimizer iterates over both at once.
    """
    flat = buffer[slot.offset : slot.offset + slot.numel]
    if parameter.is_complex():
        return flat.view(*parameter.shape, 2)
    order = memory_order(parameter)
    return flat.view([parameter.shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(order))]
    )


def _memory_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    if parameter.is_complex():
        return tuple(parameter.shape)
    return tuple(parameter.shape[dim] for dim in memory_order(parameter))


def _references(place: _Place) -> int:
    return sys.getrefcount(place.gradient)


def one_device(parameters: Sequence[torch.nn.Parameter]) -> torch.device:
    """Returns the device of all parameters. Raises UsageError if they are on several devices."""
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1:
        raise UsageError(
            f"parameters are on {', '.join(devices)}, but a rank trains on one device: move the model to one, or "
            "start one rank per device"
        )
    return parameters[0].device
