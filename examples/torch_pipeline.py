"""A model in a pipeline by torch.distributed.pipelining, over the ranks that mpirun or srun started.

    hpctrain launch -n 4 -- python examples/torch_pipeline.py --schedule zero-bubble

Each rank holds a stage, or two with `interleaved` and `zero-bubble`; all optimizers step on their own stages.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import hpctrain

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
BLOCKS, WIDTH, SAMPLES, MICRO_BATCHES = 8, 32, 64, 8


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(0)  # the same on every rank, whatever it keeps
    return [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        ).double()
        for _ in range(BLOCKS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b", choices=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    session = hpctrain.init_process_group()
    rank, num_ranks = session.rank, session.world_size
    per_rank = 2 if given.schedule in ("interleaved", "zero-bubble") else 1
    num_stages = per_rank * num_ranks
    per_stage, blocks = BLOCKS // num_stages, make_blocks()
    own = {
        number: nn.Sequential(*blocks[per_stage * number : per_stage * (number + 1)])
        for number in range(rank, num_stages, num_ranks)
    }
    stages = [PipelineStage(module, number, num_stages, session.device) for number, module in own.items()]
    schedule = SCHEDULES[given.schedule](
        stages if per_rank > 1 else stages[0],
        n_microbatches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for module in own.values() for p in module.parameters()], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    for step in range(1, given.steps + 1):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        # The first stage gets the inputs, the last one the targets; losses are those of the micro-batches.
        arguments = (inputs,) if 0 in own else ()
        last = {"target": inputs.flip(1), "losses": losses} if num_stages - 1 in own else {}
        schedule.step(*arguments, **last)
        optimizer.step()
        if losses and step % 5 == 0:
            print(f"step {step} loss {torch.stack(losses).detach().mean():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
