"""The bubble of PyTorch's pipeline schedules over hpctrain's process group, with stages that sleep.

    hpctrain launch -n 4 -- python -m benchmarks.parallel.bubble --json bubble.json

A rank's forward of a micro-batch sleeps for 20 ms and its backward for 40 ms, half of these for the gradients of the
input and half for those of the weights. With two stages a rank (interleaved, zero-bubble) each sleeps half as long. The
bubble is the part of a step in which a rank does not sleep: 1 - micro-batches * 60 ms / seconds of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
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

FORWARD_S, BACKWARD_S = 0.02, 0.04
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
    """Multiplies by a weight. part: of a rank's time, this stage's."""

    def __init__(self, width: int, *, part: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.part = part

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        half = self.part * BACKWARD_S / 2
        scaled = values * _Sleep.apply(self.weight, 0.0, half)  # type: ignore[no-untyped-call]
        slept: torch.Tensor = _Sleep.apply(scaled, self.part * FORWARD_S, half)  # type: ignore[no-untyped-call]
        return slept


def formula(schedule: str, *, num_ranks: int, micro_batches: int) -> float:
    """Returns the bubble of the schedule if communication took no time (Narayanan et al. 2021, arXiv:2104.04473); for
    zero-bubble that of interleaved, which it has to be below."""
    passes = micro_batches * (2 if schedule in OF_TWO_STAGES else 1)
    return (num_ranks - 1) / (passes + num_ranks - 1)


def measure(schedule: str, *, micro_batches: int, message_bytes: int, steps: int) -> dict[str, Any]:
    """Returns the bubble, the median of some steps after a first. Collective over the process group."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    per_rank = 2 if schedule in OF_TWO_STAGES else 1
    width = message_bytes // 4
    stages = [
        PipelineStage(
            SleepingStage(width, part=1 / per_rank), number, per_rank * num_ranks, torch.device("cpu")
        )
        for number in range(rank, per_rank * num_ranks, num_ranks)
    ]
    runs = SCHEDULES[schedule](
        stages if per_rank > 1 else stages[0], n_microbatches=micro_batches,
        loss_fn=lambda output, target: (output - target).mean(),
    )  # fmt: skip
    inputs = torch.ones(micro_batches, width)
    arguments = (inputs,) if rank == 0 else ()
    targets = {"target": inputs} if rank == num_ranks - 1 else {}
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        started = time.perf_counter()
        runs.step(*arguments, **targets, return_outputs=False)
        slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    step_s = statistics.median(seconds[1:])
    return {
        "schedule": schedule, "num_ranks": num_ranks, "micro_batches": micro_batches,
        "message_bytes": message_bytes, "step_s": step_s,
        "bubble": 1 - micro_batches * (FORWARD_S + BACKWARD_S) / step_s,
        "formula": formula(schedule, num_ranks=num_ranks, micro_batches=micro_batches),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--message-bytes", nargs="+", type=int, default=[1 << 10, 1 << 20])
    parser.add_argument("--steps", type=int, default=5, help="of which the median counts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    session = hpctrain.init_process_group()
    found = []
    for message_bytes in given.message_bytes:
        for micro_batches in given.micro_batches:
            for schedule in given.schedules:
                figures = measure(
                    schedule, micro_batches=micro_batches, message_bytes=message_bytes, steps=given.steps
                )
                found.append(figures)
                if session.rank == 0:
                    print(
                        f"{schedule:12} {micro_batches:3} micro-batches, {message_bytes:8} bytes: bubble "
                        f"{figures['bubble']:.3f} (formula {figures['formula']:.3f})",
                        flush=True,
                    )
    if session.rank == 0 and given.json is not None:
        given.json.write_text(json.dumps({"figures": found}, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
