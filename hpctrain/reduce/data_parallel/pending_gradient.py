"""What `.grad` holds while a gradient is being summed over the ranks: a tensor without memory that refuses every use.

So nothing can change a gradient whose sum has begun, or read one that is half summed: neither operations that raise no
version counter (GradScaler, fused optimizers, `.data`) nor a numpy view. PyTorch passes each operation on a tensor of
such a class to `__torch_dispatch__`, also those of autograd and of lists of tensors (`torch._foreach_*`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, final

import torch

from hpctrain.errors import BackwardRanTwice, GradientsInUse, UsageError

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
    """Has the shape, strides, dtype and device of `parameter`, and no elements. words: of the error of its use. twice:
    of that of a second backward; None: as `ran_twice` has them. held: the gradient to which a further backward adds;
    None: it is an error."""

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
        """Adds a gradient to `held`, as backward does. Returns what `.grad` is then: this, or the sum, which is not
        held any more."""
        assert self.held is not None
        if in_place:
            self.held.add_(gradient)
            return self
        held, self.held = self.held, None
        return held + gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of shape {tuple(self.shape)} that is being summed over the ranks>"


def ran_twice() -> BackwardRanTwice:
    """Returns the error for a second gradient of a parameter in a step, in the words that fit what runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and Path(code.co_filename).match("torch/utils/checkpoint.py"):
            return BackwardRanTwice(RAN_TWICE_IN_CHECKPOINT)
        frame = frame.f_back
    return BackwardRanTwice(RAN_TWICE)


def asks_for_gradients(caller: FrameType) -> bool:
    """Returns True if the code that called is a GradScaler of torch, which divides the gradients of an optimizer's
    `param_groups` in place."""
    return str(caller.f_globals.get("__name__", "")).endswith("grad_scaler")


def refuse_grad_scaler(caller: FrameType) -> None:
    """Raises UsageError if a GradScaler asks for the parameters of an updater of which each rank has a part."""
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
