"""Trains a model in a pipeline over torch.distributed by each schedule, and compares with one process, in float64."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import hpctrain

STEPS, SAMPLES, WIDTH, BLOCKS, MICRO_BATCHES = 20, 24, 16, 8, 8
RELATIVE = 1e-10


def make_blocks() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 48), torch.nn.Tanh(), torch.nn.Linear(48, WIDTH)
        ).double()
        for _ in range(BLOCKS)
    ]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (
        torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return inputs, targets


def train_alone() -> tuple[list[torch.nn.Module], list[float]]:
    blocks = make_blocks()
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return blocks, losses


def train_in_pipeline(
    make_schedule: Any, own_stages: list[int], num_stages: int
) -> tuple[dict[int, torch.nn.Module], list[float]]:
    """Returns the stages that this rank has trained, by their numbers, and the losses if the last is one of them."""
    blocks, per_stage = make_blocks(), BLOCKS // num_stages
    own = {
        number: torch.nn.Sequential(*blocks[per_stage * number : per_stage * (number + 1)])
        for number in own_stages
    }
    stages = [
        PipelineStage(module, number, num_stages, torch.device("cpu")) for number, module in own.items()
    ]
    schedule = make_schedule(
        stages if len(stages) > 1 else stages[0], n_microbatches=MICRO_BATCHES,
        loss_fn=torch.nn.functional.mse_loss,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for module in own.values() for p in module.parameters()], lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        schedule.step(
            *((inputs,) if 0 in own else ()),
            **({"target": targets, "losses": found} if num_stages - 1 in own else {}),
        )
        optimizer.step()
        if found:
            losses.append(torch.stack(found).mean().item())
    return own, losses


def check_that_messages_move_while_ranks_compute(rank: int) -> None:
    """A send ends while its receiver, which asked for the message before, is not in the library."""
    values = torch.full((1 << 18,), float(rank))
    ended = torch.zeros(1, dtype=torch.float64)
    dist.barrier()
    if rank == 0:
        work = dist.isend(values, 1)
        assert work is not None
        work.wait()
        ended[0] = time.time()
    elif rank == 1:
        work = dist.irecv(values, 0)
        assert work is not None
        time.sleep(3)
        ended[0] = time.time()
        work.wait()
        assert float(values.sum()) == 0.0
    times = [torch.zeros_like(ended) for _ in range(dist.get_world_size())]
    dist.all_gather(times, ended)
    assert times[0] < times[1], times


def main() -> None:
    session = hpctrain.init_process_group(timeout_s=300)
    rank, size = session.rank, session.world_size
    check_that_messages_move_while_ranks_compute(rank)
    expected, expected_losses = train_alone()
    loop = [rank, size + rank]
    ways: dict[str, tuple[Any, list[int]]] = {
        "GPipe": (ScheduleGPipe, [rank]),
        "1F1B": (Schedule1F1B, [rank]),
        "interleaved": (ScheduleInterleaved1F1B, loop),
        "zero bubble": (ScheduleInterleavedZeroBubble, loop),
        "zero bubble in a V": (ScheduleZBVZeroBubble, [rank, 2 * size - 1 - rank]),
    }
    for name, (make_schedule, own_stages) in ways.items():
        num_stages = size * len(own_stages)
        own, losses = train_in_pipeline(make_schedule, own_stages, num_stages)
        worst = 0.0
        for number, module in own.items():
            wanted = torch.nn.Sequential(
                *expected[BLOCKS // num_stages * number : BLOCKS // num_stages * (number + 1)]
            )
            for found, value in zip(module.state_dict().values(), wanted.state_dict().values(), strict=True):
                worst = max(worst, float((found - value).abs().max() / value.abs().max()))
        assert worst < RELATIVE, f"{name}: {worst}"
        if losses:
            torch.testing.assert_close(losses, expected_losses, rtol=RELATIVE, atol=0)
            print(f"{name} on {size} ranks: losses and parameters agree, {worst:.1e}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} agrees", flush=True)


if __name__ == "__main__":
    sys.exit(main())
