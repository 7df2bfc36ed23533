"""What ranks do to measure stale reads: steps whose computation is a wait, synchronous or with stale reads, in turns.

Reading, writing and the optimizer are real. A wait lets more ranks than cores be measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.ranks import Case, Settings
from hpctrain.reduce import SspUpdater
from hpctrain.run import Session

SLOW_RANK, SLOW_EVERY = 1, 10  # one rank is twice as slow in one of its ten steps
PARAMETERS = 100_000


def stale_steps(session: Session, settings: Settings) -> dict[str, Any]:
    """Returns by name of the cell, for each round: `seconds` of a step, the `largest` staleness, and the `share` of the
    parts that the slow rank computed.

    settings: `staleness`, `num_steps` and `num_rounds` of each cell, and `step_s`, the seconds that a step computes.
    """
    cells: dict[str, list[dict[str, float]]] = {}
    for _ in range(settings["num_rounds"]):
        for staleness in (None, settings["staleness"]):
            for slow in (False, True):
                name = ("synchronous" if staleness is None else "stale") + (", one rank slow" if slow else "")
                cells.setdefault(name, []).append(_cell(session, staleness, slow=slow, settings=settings))
    asked = {name: settings[name] for name in ("staleness", "num_steps", "step_s")}
    return {"cells": cells, "ranks": session.world_size, **asked}


def at_most(num_ranks: int) -> float:
    """Returns the largest share of the lost time that the other ranks can win back by taking over work."""
    speed = 1 / (1 + 1 / SLOW_EVERY)  # of the slow rank
    return 1 - (num_ranks / (num_ranks - 1 + speed) - 1) * SLOW_EVERY


def _cell(session: Session, staleness: Any, *, slow: bool, settings: Settings) -> dict[str, float]:
    num_steps, step_s = settings["num_steps"], settings["step_s"]
    model = torch.nn.Linear(PARAMETERS // 10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    schedule = None if staleness is None else {"method": "ssp", "staleness": staleness}
    updater = session.distributed_optimizer(model, optimizer, schedule=schedule)
    inputs = torch.ones(1, PARAMETERS // 10)
    parts = 0

    def compute() -> None:
        nonlocal parts
        parts += 1
        is_slow = slow and session.rank == SLOW_RANK and parts % SLOW_EVERY == 0
        time.sleep(2 * step_s if is_slow else step_s)
        updater.backward(model(inputs).square().mean(), weight=1 / session.world_size)
        updater.step()

    session.world.barrier()
    began, largest = time.perf_counter(), 0
    if isinstance(updater, SspUpdater):
        while updater.take(until=num_steps) is not None:
            compute()
        updater.complete(num_steps)
        largest = updater.figures.largest_staleness
    else:
        for _ in range(num_steps):
            compute()
    session.world.barrier()
    took_s = time.perf_counter() - began
    updater.close()
    share = parts / (num_steps * session.world_size) if session.rank == SLOW_RANK else 0.0
    found = {"seconds": took_s / num_steps, "largest": float(largest), "share": share}
    return session.all_reduce(found, op="max")


CASES: Mapping[str, Case] = {"stale_steps": stale_steps}
