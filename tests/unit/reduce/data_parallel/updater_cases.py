"""What the updater's tests share: a small net, its data, and ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from hpctrain.comm import World, make_two_level
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.reduce import AllReduceUpdater
from hpctrain.reduce.collective_reducers.collective_reducer import CollectiveReducer
from hpctrain.reduce.contract.bucket_plan import Bucket
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.factory import LocalReducer
from hpctrain.topology import Topology

BATCH = 24


class Net(torch.nn.Module):
    """With a parameter that is used only when asked for, and a tied one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = torch.nn.Parameter(torch.randn(8, 6, generator=generator, dtype=dtype))
        self.second = torch.nn.Parameter(torch.randn(6, 6, generator=generator, dtype=dtype))
        self.rare = torch.nn.Parameter(torch.randn(6, generator=generator, dtype=dtype))

    def forward(self, x: torch.Tensor, *, with_rare: bool = False) -> torch.Tensor:
        hidden = torch.tanh(x @ self.first) @ self.second @ self.second
        return hidden + self.rare if with_rare else hidden


def batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 8, generator=generator, dtype=dtype)
    return x, torch.randint(0, 6, (BATCH,), generator=generator)


def share(world: World) -> slice:
    whole, rest = divmod(BATCH, world.num_ranks)
    first = world.rank * whole + min(world.rank, rest)
    return slice(first, first + whole + (world.rank < rest))


def reducer_for(world: World, *, nodes: list[str] | None = None, wire: str = "fp32") -> BucketReducer:
    if world.num_ranks == 1:
        return LocalReducer(wire=wire)
    topology = Topology.from_node_names(nodes or ["a"] * world.num_ranks)
    if nodes is None:
        return CollectiveReducer.flat(world.duplicate(), topology=topology, wire=wire)
    levels = make_two_level(world, topology)
    return CollectiveReducer.hierarchical(world.duplicate(), levels=levels, topology=topology, wire=wire)


class Watched:
    """A reducer that writes down what it is asked to plan and to reduce, and what it is told of steps."""

    def __init__(self, reducer: BucketReducer) -> None:
        self._reducer = reducer
        self.plans: list[tuple[Bucket, ...]] = []
        self.reduced: list[int] = []
        self.settled: list[tuple[bool, float]] = []
        self.loaded: list[dict[str, torch.Tensor]] = []

    def plan(self, buckets: Sequence[Bucket], *, device: torch.device) -> list[torch.Tensor]:
        self.plans.append(tuple(buckets))
        return self._reducer.plan(buckets, device=device)

    def reduce(self, number: int) -> Iterator[bool]:
        self.reduced.append(number)
        return self._reducer.reduce(number)

    def end_step(self, *, applied: bool, rescale: float) -> None:
        self.settled.append((applied, rescale))
        self._reducer.end_step(applied=applied, rescale=rescale)

    def load_state(
        self, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self.loaded.append(dict(tensors))
        self._reducer.load_state(tensors, shapes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def make(
    world: World, *, dtype: torch.dtype = torch.float64, momentum: float = 0.9, **options: Any
) -> tuple[Net, AllReduceUpdater]:
    net = Net(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)
    reducer = options.pop("reducer", None) or reducer_for(world, wire=options.pop("wire", "fp32"))
    return net, AllReduceUpdater(optimizer, comm=world, reducer=reducer, bucket_bytes=100, **options)


def on_threads(num_ranks: int, function: Callable[[World], Any]) -> list[Any]:
    return run_threads(num_ranks, function, timeout_s=300)


def train(
    world: World,
    *,
    steps: int = 10,
    micro_batches: int = 1,
    nodes: list[str] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, Any]:
    if nodes is not None:
        options["reducer"] = reducer_for(world, nodes=nodes)
    net, updater = make(world, dtype=dtype, **options)
    losses, norms = [], []
    for step in range(steps):
        x, y = (t[share(world)] for t in batch(step, dtype))
        parts = list(zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True))
        total = 0.0
        for number, (px, py) in enumerate(parts, start=1):
            loss = functional.cross_entropy(net(px), py)
            updater.backward(loss, weight=len(py) / BATCH, last=number == len(parts))
            total += float(loss.detach()) * len(py) / BATCH
        outcome = updater.step(sums={"loss": total})
        losses.append(outcome.sums["loss"])
        norms.append(outcome.grad_norm)
    updater.close()
    return {"losses": losses, "norms": norms, "parameters": [p.detach().clone() for p in net.parameters()]}


def closeness(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def plain_torch(steps: int = 10) -> list[float]:
    """The same training with nothing of ours in it."""
    net = Net(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for step in range(steps):
        x, y = batch(step, torch.float64)
        loss = functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
