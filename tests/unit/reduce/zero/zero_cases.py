"""What the tests of a sharded optimizer share: a net, its training on ranks that are threads, plain and sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpctrain.comm import World
from hpctrain.reduce import AllReduceUpdater, ReducerMaker, ZeroUpdater, parse_algorithm
from hpctrain.topology import Topology

# Nodes of the ranks, by rank; round robin in some, so that a node's ranks are not neighbours.
LAYOUTS = ["aa", "ab", "aaa", "aba", "abc", "aabb", "abab", "abbb", "abca", "abcd"]
SHARDED = ("optimizer", "gradients")
BATCH = 13


class Net(nn.Module):
    """A convolution in channels-last, a large and some small layers, a scalar, and a parameter that is used rarely."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 9, 3).to(memory_format=torch.channels_last)
        self.wide, self.out = nn.Linear(9 * 4, 150), nn.Linear(150, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.rare = nn.Parameter(torch.ones(130))

    def forward(self, x: torch.Tensor, *, with_rare: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.wide(torch.relu(self.image(x)).flatten(1))) * self.scale
        found: torch.Tensor = self.out(hidden)
        return found + self.rare.sin().sum() if with_rare else found


@dataclass(kw_only=True)
class Plan:
    """How a net is trained. rare_at: the steps in which one rank uses the rare parameter. looks_at: those after which
    parameters are read, and an evaluation runs."""

    shard: str
    layout: str
    algorithm: str = "hierarchical"
    wire: str = "fp32"
    dtype: torch.dtype = torch.float32
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = field(
        default=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    )
    steps: int = 5
    micro_batches: int = 1
    clip_norm: float | None = None
    overlap: bool = True
    rare_at: tuple[int, ...] = (1, 3)
    looks_at: tuple[int, ...] = ()
    bucket_bytes: int = 3000
    align_elems: int = 64


def make_updater(
    world: World, plan: Plan, optimizer: torch.optim.Optimizer, *, model: nn.Module | None = None
) -> tuple[AllReduceUpdater | ZeroUpdater, Any]:
    """Returns the updater of a plan, and its reducer. Collective."""
    topology = Topology.from_node_names(list(plan.layout))
    maker = ReducerMaker(world, topology=topology)
    common: dict[str, Any] = {
        "comm": world, "bucket_bytes": plan.bucket_bytes, "clip_norm": plan.clip_norm, "overlap": plan.overlap,
    }  # fmt: skip
    if plan.shard == "none" or world.num_ranks == 1:
        reducer = maker.make(parse_algorithm(plan.algorithm), wire=plan.wire)
        return AllReduceUpdater(optimizer, reducer=reducer, **common), reducer
    scatter = maker.make_zero(plan.algorithm, wire=plan.wire)
    keeps = plan.shard == "optimizer"
    return (
        ZeroUpdater(
            optimizer,
            reducer=scatter,
            keeps_gradients=keeps,
            align_elems=plan.align_elems,
            model=model,
            **common,
        ),
        scatter,
    )


def net_of(dtype: torch.dtype) -> Net:
    """The same on every rank."""
    net, random = Net(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
    return net.to(dtype)


def samples(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(BATCH, 3, 4, 4, generator=torch.Generator().manual_seed(step), dtype=dtype)


def share(world: World) -> slice:
    whole, rest = divmod(BATCH, world.num_ranks)
    first = world.rank * whole + min(world.rank, rest)
    return slice(first, first + whole + (world.rank < rest))


def take_step(
    world: World, net: Net, updater: AllReduceUpdater | ZeroUpdater, plan: Plan, step: int
) -> tuple[float, float]:
    """Returns the loss of the global batch and the gradients' norm."""
    mine = samples(step, plan.dtype)[share(world)]
    loss_of_share = 0.0
    parts = [part for part in mine.tensor_split(plan.micro_batches) if len(part)]
    for number, part in enumerate(parts, start=1):
        with_rare = step in plan.rare_at and world.rank == world.num_ranks - 1
        loss = net(part, with_rare=with_rare).square().mean()
        updater.backward(loss, weight=len(part) / BATCH, last=number == len(parts))
        loss_of_share += loss.item() * len(part) / BATCH
    outcome = updater.step(sums={"loss": loss_of_share})
    return outcome.sums["loss"], outcome.grad_norm


def train(world: World, plan: Plan) -> dict[str, Any]:
    net = net_of(plan.dtype)
    optimizer = plan.make_optimizer(list(net.parameters()))
    updater, reducer = make_updater(world, plan, optimizer)
    found, seen = [], []
    for step in range(plan.steps):
        found.append(take_step(world, net, updater, plan, step))
        if step in plan.looks_at:
            with torch.no_grad():
                seen.append(net(samples(99, plan.dtype)))
            seen += [tensor.clone() for tensor in net.state_dict().values()]
    state = [
        value.numel()
        for leaves in optimizer.state.values()
        for key, value in leaves.items()
        if isinstance(value, torch.Tensor) and key != "step"
    ]
    updater.close()  # the parameters of the last step are sent too
    sent = reducer.bytes_sent()
    reducer.close()
    return {
        "parameters": [parameter.detach().clone() for parameter in net.parameters()],
        "seen": seen,
        "losses": [loss for loss, _ in found],
        "norms": [norm for _, norm in found],
        "state_elems": sum(state),
        "sent": sent,
    }
