"""What ranks do in `stale_reads`: steps whose computation is a wait, synchronous or with stale reads."""

from __future__ import annotations

import time
from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.reduce import SspUpdater
from tests.sessions import session_over

SLOW_RANK, SLOW_EVERY = 1, 10  # one rank is twice as slow in one of its ten steps
PARAMETERS = 100_000


def seconds_per_step(
    world: World, staleness: Any, slow: bool, num_steps: int, step_s: float
) -> dict[str, float]:
    """staleness: of the parameter server; None: synchronous training. Returns the seconds of a step of all ranks, the
    largest staleness, and this rank's share of the parts."""
    with session_over(world) as session:
        model = torch.nn.Linear(PARAMETERS // 10, 10, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = None if staleness is None else {"method": "ssp", "staleness": staleness}
        updater = session.distributed_optimizer(model, optimizer, schedule=schedule, algorithm="auto")
        inputs = torch.ones(1, PARAMETERS // 10)
        parts = 0

        def compute() -> None:
            nonlocal parts
            parts += 1
            is_slow = slow and world.rank == SLOW_RANK and parts % SLOW_EVERY == 0
            time.sleep(2 * step_s if is_slow else step_s)
            updater.backward(model(inputs).square().mean(), weight=1 / world.num_ranks)
            updater.step()

        world.barrier()
        began = time.perf_counter()
        largest = 0
        if isinstance(updater, SspUpdater):
            while updater.take(until=num_steps) is not None:
                compute()
            updater.complete(num_steps)
            largest = updater.figures.largest_staleness
        else:
            for _ in range(num_steps):
                compute()
        world.barrier()
        took_s = time.perf_counter() - began
        return {
            "seconds": took_s / num_steps,
            "largest": largest,
            "share": parts / (num_steps * world.num_ranks),
        }
