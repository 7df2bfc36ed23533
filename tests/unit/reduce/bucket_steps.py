"""Steps of a reducer that feeds errors back, with ranks as threads: what went in, what came out, what is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.reduce.contract.bucket_plan import Bucket, GradientSpec, plan_buckets
from hpctrain.reduce.contract.bucket_reducer import BucketReducer, StateTensor

CPU = torch.device("cpu")
SHAPES = ((24, 20), (20,), (16, 3, 6), (30, 18), (5,))
Make = Callable[[World], BucketReducer]
# One rank's gradients of a step, by parameter; None: it had none.
Gradients = Callable[[int, int], Sequence[torch.Tensor | None]]


def buckets_of(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int = 4000,
) -> tuple[Bucket, ...]:
    specs = [GradientSpec(math.prod(shape), dtype, shape) for shape in shapes]
    return plan_buckets(specs, bucket_bytes=bucket_bytes)


def random_gradients(
    *, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> Gradients:
    """Another one in every step and on every rank, around a mean that stays."""

    def gradients(step: int, rank: int) -> list[torch.Tensor | None]:
        mean, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1000 * step + rank)
        return [
            size * (torch.randn(s, generator=mean, dtype=dtype) + torch.randn(s, generator=own, dtype=dtype))
            for s in shapes
        ]

    return gradients


@dataclass
class Steps:
    """A reducer at work on one rank. outputs, flags: of each step, what came out by parameter."""

    reducer: BucketReducer
    buckets: tuple[Bucket, ...]
    rank: int
    memory: list[torch.Tensor]
    outputs: list[dict[int, torch.Tensor]] = field(default_factory=list)
    flags: list[dict[int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, world: World, make: Make, *, buckets: tuple[Bucket, ...]) -> Steps:
        reducer = make(world)
        return cls(reducer, buckets, world.rank, reducer.plan(buckets, device=CPU))

    def step(self, gradients: Sequence[torch.Tensor | None], *, rescale: float = 1.0) -> None:
        """One step, settled as the updater does: applied if all sums are finite."""
        sums, flags, finite = {}, {}, True
        for number, (bucket, memory) in enumerate(zip(self.buckets, self.memory, strict=True)):
            memory.zero_()
            for slot in bucket.slots:
                gradient = gradients[slot.parameter]
                if gradient is not None:
                    memory[slot.offset : slot.offset + slot.numel] = gradient.reshape(-1)
                    memory[slot.used_flag] = 1
            for _ in self.reducer.reduce(number):
                pass
            for slot in bucket.slots:
                sums[slot.parameter] = memory[slot.offset : slot.offset + slot.numel].clone()
                flags[slot.parameter] = float(memory[slot.used_flag])
            finite = finite and bool(memory[: bucket.num_gradients].isfinite().all())
        self.outputs.append(sums)
        self.flags.append(flags)
        self.reducer.end_step(applied=finite, rescale=rescale)

    def run(self, gradients: Gradients, *, first: int = 0, count: int) -> Steps:
        for step in range(first, first + count):
            self.step(gradients(step, self.rank))
        return self

    def state(self) -> dict[str, StateTensor]:
        return {t.name: t for t in self.reducer.state()}


def on_ranks(num_ranks: int, function: Callable[[World], Any]) -> list[Any]:
    return run_threads(num_ranks, function, timeout_s=300)


def whole_state(ranks: Sequence[Steps]) -> dict[str, torch.Tensor]:
    """What a checkpoint would hold: every rank's blocks put into the global tensors."""
    whole: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, block in rank.state().items():
            into = whole.setdefault(name, torch.full(block.global_shape, -1, dtype=block.tensor.dtype))
            place = tuple(slice(o, o + n) for o, n in zip(block.offset, block.tensor.shape, strict=True))
            into[place] = block.tensor
    return whole


def true_sums(gradients: Gradients, *, num_ranks: int, count: int) -> dict[int, torch.Tensor]:
    """Of `count` steps and all ranks, in float64, by parameter."""
    sums: dict[int, torch.Tensor] = {}
    for step in range(count):
        for rank in range(num_ranks):
            for parameter, gradient in enumerate(gradients(step, rank)):
                if gradient is not None:
                    flat = gradient.double().reshape(-1)
                    sums[parameter] = sums[parameter] + flat if parameter in sums else flat
    return sums


def in_gradient_space(by_parameter: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.cat([by_parameter[parameter].reshape(-1) for parameter in sorted(by_parameter)])


def delivered(ranks: Sequence[Steps]) -> torch.Tensor:
    """Rank 0's outputs of all steps added up, in gradient space, float64."""
    return torch.stack([in_gradient_space(sums).double() for sums in ranks[0].outputs]).sum(dim=0)


def same_outputs(a: Steps, b: Steps, *, last: int) -> bool:
    """Whether the `last` steps of both came to the same bits."""
    pairs = zip(a.outputs[-last:], b.outputs[-last:], strict=True)
    return all(torch.equal(x[parameter], y[parameter]) for x, y in pairs for parameter in x)
