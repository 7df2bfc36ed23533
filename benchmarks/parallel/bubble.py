"""What the ranks do for the figure of bubbles: PyTorch's pipeline schedules over hpctrain's process group, with stages
that sleep.

A rank's backward of a micro-batch sleeps half of its time for the gradients of the input and half for those of the
weights. With two stages a rank (interleaved, zero-bubble) each sleeps half as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import hpctrain
from hpctrain.run import Session

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
OF_TWO_STAGES = ("interleaved", "zero-bubble")


class _Sleep(torch.autograd.Function):
    """Returns its input; sleeps for `forward_s` then, and for `backward_s` in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class SleepingStage(torch.nn.Module):
    """Multiplies by a weight, and sleeps so long in forward and in backward of a micro-batch."""

    def __init__(self, width: int, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        half = self.backward_s / 2
        scaled = values * _Sleep.apply(self.weight, 0.0, half)  # type: ignore[no-untyped-call]
        slept: torch.Tensor = _Sleep.apply(scaled, self.forward_s, half)  # type: ignore[no-untyped-call]
        return slept


def bubble(session: Session, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measures every schedule with each number of micro-batches and each size of a message. Collective.

    settings: `micro_batches`, `message_bytes`; `steps` that count; `forward_s`, `backward_s` of a rank and micro-batch.
    Returns of each: `schedule`, `micro_batches`, `message_bytes`, `seconds` of each step on the slowest rank, and
    `alone_s`, in which a rank computes these micro-batches without messages, while the others do the same.
    """
    hpctrain.init_process_group(session)
    sleeps = {name: settings[name] for name in ("forward_s", "backward_s")}
    found = [
        {
            "schedule": schedule,
            "micro_batches": micro_batches,
            "message_bytes": message_bytes,
            **_measured(
                schedule, micro_batches=micro_batches, message_bytes=message_bytes, steps=settings["steps"],
                **sleeps,
            ),
        }
        for message_bytes in settings["message_bytes"]
        for micro_batches in settings["micro_batches"]
        for schedule in SCHEDULES
    ]  # fmt: skip
    dist.destroy_process_group()
    return found


def _measured(
    schedule: str, *, micro_batches: int, message_bytes: int, steps: int, forward_s: float, backward_s: float
) -> dict[str, Any]:
    """Returns the `seconds` of each step after a first that does not count, and `alone_s`. Collective."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    per_rank = 2 if schedule in OF_TWO_STAGES else 1
    width = message_bytes // 4
    modules = {
        number: SleepingStage(width, forward_s=forward_s / per_rank, backward_s=backward_s / per_rank)
        for number in range(rank, per_rank * num_ranks, num_ranks)
    }
    stages = [
        PipelineStage(module, number, per_rank * num_ranks, torch.device("cpu"))
        for number, module in modules.items()
    ]
    runs = SCHEDULES[schedule](
        stages if per_rank > 1 else stages[0], n_microbatches=micro_batches,
        loss_fn=lambda output, target: (output - target).mean(),
    )  # fmt: skip
    inputs = torch.ones(micro_batches, width)
    arguments = (inputs,) if rank == 0 else ()
    targets = {"target": inputs} if rank == num_ranks - 1 else {}

    def alone() -> None:
        for module in modules.values():
            for row in inputs.split(1):
                module(row.requires_grad_()).mean().backward()

    return {
        "alone_s": min(_on_slowest(alone, times=2)),
        "seconds": _on_slowest(
            lambda: runs.step(*arguments, **targets, return_outputs=False), times=steps + 1
        )[1:],
    }


def _on_slowest(run: Callable[[], object], *, times: int) -> list[float]:
    """Returns the seconds of each call of `run` on the slowest rank. Collective."""
    found = []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        run()
        slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(float(slowest))
    return found
