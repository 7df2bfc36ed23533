"""Data parallel: every rank holds all parameters; gradients are summed over the ranks in buckets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, final

import torch

from hpctrain.comm import Collective
from hpctrain.errors import UsageError
from hpctrain.reduce.buckets import Bucket, GradientSpec, plan_buckets
from hpctrain.reduce.pipeline import ReductionPipeline
from hpctrain.reduce.scale import LossScale
from hpctrain.reduce.updater import StepOutcome
from hpctrain.reduce.wire import WireFormat

# Sums a buffer over all ranks, in place; collective. Flat or two-level: the updater does not care.
Reducer = Callable[[torch.Tensor], None]


@final
class AllReduceUpdater:
    """`Updater` that all-reduces gradient buckets on its own thread while backward goes on.

    optimizer: any torch optimizer; its parameters have the same shapes, in the same order, on every rank.
    comm: the world, used from the calling thread for the small sums of a step.
    reduce: sums a bucket over all ranks from the reduction thread; must not share `comm`'s message space.
    weight default: a plain `loss.backward()` counts as 1/num_ranks, as Horovod averages.
    Sparse gradients are made dense before they are sent.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        comm: Collective,
        reduce: Reducer,
        wire: WireFormat = WireFormat.FP32,
        bucket_bytes: int = 4_000_000,
        loss_scale: LossScale | None = None,
        clip_norm: float | None = None,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm}: give a number above 0, or none to clip nothing")
        self._optimizer = optimizer
        self._comm = comm
        self._clip_norm = clip_norm
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not self._parameters:
            raise UsageError(
                "the optimizer holds no parameter that needs a gradient: there is nothing to train"
            )
        fp16 = wire is WireFormat.FP16
        self._scale = loss_scale or LossScale(value=2.0**10 if fp16 else 1.0, dynamic=fp16)
        specs = [GradientSpec(p.numel(), p.dtype) for p in self._parameters]
        self._buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)
        self._buffers = [
            torch.zeros(
                b.numel, dtype=wire.dtype_for(b.dtype), device=self._parameters[b.slots[0].parameter].device
            )
            for b in self._buckets
        ]
        self._place = {
            slot.parameter: (number, slot)
            for number, bucket in enumerate(self._buckets)
            for slot in bucket.slots
        }
        self._distributed = comm.num_ranks > 1
        self._pipeline = ReductionPipeline(reduce) if self._distributed else None
        self._syncing = True
        self._reset()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(index))
            for index, p in enumerate(self._parameters)
        ]

    # ------------------------------------------------------------------ what the loop calls

    @property
    def loss_scale(self) -> LossScale:
        return self._scale

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The plan: what is sent in one step, in order."""
        return self._buckets

    def backward(self, loss: torch.Tensor, *, weight: float, last: bool = True) -> None:
        self._loss_is_weighted = True
        factor = weight * self._scale.value
        if last:
            (loss * factor).backward()
        else:
            with self.no_sync():
                (loss * factor).backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own: for scripts that set the learning rate through their optimizer."""
        return self._optimizer.param_groups

    def zero_grad(self) -> None:
        """As the optimizer's: for scripts that treat the updater as their optimizer."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, *, sums: Mapping[str, float] | None = None) -> StepOutcome:
        self._check_plan()
        started = time.perf_counter()
        sync_s = self._finish_reduction()
        waited_s = time.perf_counter() - started
        self._take_gradients()
        norm = self._grad_norm()
        started = time.perf_counter()
        totals, finite = self._agree(sums or {}, finite=math.isfinite(norm))
        waited_s += time.perf_counter() - started
        used_scale = self._scale.value
        if finite:
            if self._clip_norm is not None and norm > self._clip_norm:
                torch._foreach_mul_(self._gradients(), self._clip_norm / norm)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._reset()
        self._scale = self._scale.after_good_step() if finite else self._scale.after_overflow()
        return StepOutcome(
            applied=finite,
            grad_norm=norm if finite else math.nan,
            loss_scale=used_scale,
            sums=totals,
            sync_s=sync_s + (waited_s if not self._distributed else 0.0),
            exposed_sync_s=waited_s if self._distributed else 0.0,
        )

    def state(self) -> dict[str, Any]:
        return {"loss_scale": asdict(self._scale)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        saved = state["loss_scale"]
        # Whether the scale moves, and its limits, are this run's choice; its value and history are the saved run's.
        if self._scale.dynamic and saved["dynamic"]:
            self._scale = replace(self._scale, value=saved["value"], good_steps=saved["good_steps"])
        self._scale = replace(
            self._scale, skipped_in_row=saved["skipped_in_row"], skipped_total=saved["skipped_total"]
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    # ------------------------------------------------------------------ how it is done

    def _reset(self) -> None:
        self._waiting_for = [len(bucket.slots) for bucket in self._buckets]
        self._placed = [False] * len(self._parameters)
        # The gradient tensor that was put on the wire, and its count of in-place changes then.
        self._sent: list[tuple[torch.Tensor, int] | None] = [None] * len(self._parameters)
        self._next_bucket = 0
        self._loss_is_weighted = False

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_ready(parameter: torch.Tensor) -> None:
            if self._syncing:
                self._put(index, parameter.grad)
                self._send_complete_buckets()

        return gradient_is_ready

    def _put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Cast the gradient into its place on the wire; each parameter once a step."""
        if self._placed[index]:
            raise UsageError(
                "backward ran twice before step(): the first gradients are already on the wire. Wrap all but "
                "the last backward of a step in `with updater.no_sync():`"
            )
        self._placed[index] = True
        self._sent[index] = None if gradient is None else (gradient, gradient._version)
        number, slot = self._place[index]
        buffer = self._buffers[number]
        view = buffer[slot.offset : slot.offset + slot.numel]
        if gradient is None:
            view.zero_()
            buffer[slot.used_flag] = 0
        else:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            # Scale before the cast: many ranks' gradients near 1024 overflow float16 when summed.
            torch.mul(dense.reshape(-1), self._factor(), out=view)
            buffer[slot.used_flag] = 1
        self._waiting_for[number] -= 1

    def _factor(self) -> float:
        return 1.0 if self._loss_is_weighted else self._scale.value / self._comm.num_ranks

    def _send_complete_buckets(self) -> None:
        """In the order of the plan, which is the same on every rank: the reductions must match."""
        while self._next_bucket < len(self._buckets) and self._waiting_for[self._next_bucket] == 0:
            if self._pipeline is not None:
                self._pipeline.submit(self._buffers[self._next_bucket])
            self._next_bucket += 1

    def _finish_reduction(self) -> float:
        """Send what no hook has sent: unused parameters, ranks without samples. Seconds of reduction."""
        for index, parameter in enumerate(self._parameters):
            if not self._placed[index]:
                self._put(index, parameter.grad)
        self._send_complete_buckets()
        return self._pipeline.wait() if self._pipeline is not None else 0.0

    def _take_gradients(self) -> None:
        """Reduced and unscaled gradients from the buckets back into `.grad`."""
        inverse = 1.0 / self._scale.value
        # All flags at once: on a GPU each look at a value waits for the device.
        flags = torch.cat([
            buffer[bucket.slots[0].used_flag :].float()
            for bucket, buffer in zip(self._buckets, self._buffers, strict=True)
        ]).tolist()  # fmt: skip
        slots = [(buffer, slot) for bucket, buffer in zip(self._buckets, self._buffers, strict=True)
                 for slot in bucket.slots]  # fmt: skip
        for (buffer, slot), flag in zip(slots, flags, strict=True):
            parameter = self._parameters[slot.parameter]
            self._check_untouched(slot.parameter)
            if flag == 0:
                parameter.grad = None
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            # Copied first: unscaled in float16, small gradients would vanish here instead of on the wire.
            reduced = buffer[slot.offset : slot.offset + slot.numel].view(parameter.shape)
            parameter.grad.copy_(reduced).mul_(inverse)

    def _check_untouched(self, index: int) -> None:
        """What was changed in `.grad` after backward is not on the wire, and would be lost in silence."""
        gradient, sent = self._parameters[index].grad, self._sent[index]
        same = gradient is None if sent is None else gradient is sent[0] and gradient._version == sent[1]
        if not same:
            raise UsageError(
                "gradients were changed between backward and step(): they are on their way to the other ranks "
                "by then, and the change would be lost. To clip, give clip_norm= when the updater is made"
            )

    def _check_plan(self) -> None:
        """The optimizer's trainable parameters are those that the buckets were planned for."""
        now = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        if len(now) != len(self._parameters) or any(
            a is not b for a, b in zip(now, self._parameters, strict=True)
        ):
            raise UsageError(
                f"the optimizer has {len(now)} trainable parameters now, {len(self._parameters)} when the updater was "
                "made: others would not be reduced and the ranks would drift apart. Close this updater and make "
                "a new one after freezing, unfreezing or adding parameters"
            )

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _grad_norm(self) -> float:
        gradients = self._gradients()
        if not gradients:
            return 0.0
        norms = torch.stack([n.double() for n in torch._foreach_norm(gradients)])
        return float(torch.linalg.vector_norm(norms))

    def _agree(self, sums: Mapping[str, float], *, finite: bool) -> tuple[dict[str, float], bool]:
        """Add up the caller's numbers, and let any rank's overflow skip the step on all."""
        keys = sorted(sums)
        buffer = torch.tensor([0.0 if finite else 1.0, *(sums[k] for k in keys)], dtype=torch.float64)
        self._comm.all_reduce(buffer)
        overflowed, *totals = buffer.tolist()
        return dict(zip(keys, totals, strict=True)), overflowed == 0
