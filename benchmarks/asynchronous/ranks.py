"""What the ranks do for the steps that are timed: a model of 25 million parameters, one rank on each of two nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from benchmarks.ranks import Case, Settings
from benchmarks.reduction.methods import start_gloo
from benchmarks.reduction.ranks import Ranks
from hpctrain.run import Session

THREADS = 1
LEARNING_RATE = 1e-3


def make_model(*, width: int, layers: int) -> nn.Module:
    """Returns an MLP of layers x (width x width + width) parameters."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


@dataclass(kw_only=True)
class Method:
    """A method of training. every: steps of a round. step: one step, collective when a round ends."""

    every: int
    step: Callable[[], None]
    close: Callable[[], object] = lambda: None


def ours(
    session: Session, model: nn.Module, loss: Callable[[], torch.Tensor], schedule: Mapping[str, Any] | None
) -> Method:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    updater = session.distributed_optimizer(model, optimizer, schedule=schedule, compare_ranks="off")
    share = 1 / session.world_size

    def step() -> None:
        updater.backward(loss(), weight=share)
        updater.step(sums={"loss": 0.0})

    return Method(every=schedule["every"] if schedule else 1, step=step, close=updater.close)


def post_local_sgd(
    session: Session, model: nn.Module, loss: Callable[[], torch.Tensor], *, every: int
) -> Method:
    """PyTorch's optimizer over Gloo: local steps, and an all-reduce of the parameters every `every` steps."""
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        averager=PeriodicModelAverager(period=every, warmup_steps=0),
    )

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # type: ignore[no-untyped-call]

    return Method(every=every, step=step)


def steps(session: Session, settings: Settings) -> dict[str, Any]:
    """Returns seconds and bytes of one method's rounds.

    settings: `method`, the table of a schedule, "synchronous" or "post-local over gloo"; `every`, steps of a round;
    `width` and `layers` of the model; `samples` of a rank in a step; `num_rounds`, after one that is not timed.
    Returns `seconds`, of each round the time of the slowest rank; `node_bytes`, of each round the bytes that left each
    node; `steps`, of a round; and the number of `parameters`.
    """
    ranks = Ranks.of(session)
    torch.manual_seed(settings["seed"])
    model = make_model(width=settings["width"], layers=settings["layers"])
    draw = torch.Generator().manual_seed(settings["seed"] + session.rank)
    inputs = torch.randn(settings["samples"], settings["width"], generator=draw)
    wanted = torch.randn(settings["samples"], settings["width"], generator=draw)

    def loss() -> torch.Tensor:
        return nn.functional.mse_loss(model(inputs), wanted)

    asked = settings["method"]
    if asked == "post-local over gloo":
        start_gloo(ranks.comm)
        method = post_local_sgd(session, model, loss, every=settings["every"])
    else:
        method = ours(session, model, loss, None if asked == "synchronous" else asked)
    num_steps = max(method.every, settings["least_steps"])
    found: dict[str, Any] = {"seconds": [], "node_bytes": [], "steps": num_steps}
    for number in range(1 + settings["num_rounds"]):
        before = ranks.node_bytes()
        seconds = _round_s(ranks, method, num_steps=num_steps)
        counted = [now - then for now, then in zip(ranks.node_bytes(), before, strict=True)]
        if number:
            found["seconds"].append(seconds)
            found["node_bytes"].append(counted)
    method.close()
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    if asked == "post-local over gloo":
        dist.destroy_process_group()
    return found


def _round_s(ranks: Ranks, method: Method, *, num_steps: int) -> float:
    from mpi4py import MPI

    ranks.comm.Barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        method.step()
    return float(ranks.comm.allreduce(time.perf_counter() - began, op=MPI.MAX))


CASES: dict[str, Case] = {"steps": steps}
