"""Training of both demo tasks with an algorithm and a wire of one's choice: what `test_wire_quality` compares.

The recipes of `examples/`, smaller where a test must be quick. Ranks are threads on three nodes, and reduce with what a
run reduces with; batches are drawn from a seeded
generator, the same global batch whatever the wire.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from hpctrain.comm import World
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.data.sources.registry import ArraySource, TextSource, open_source, read_tokens
from hpctrain.reduce import AllReduceUpdater
from hpctrain.reduce.algorithms import Algorithm
from hpctrain.reduce.contract.bucket_reducer import BucketReducer
from hpctrain.reduce.factory import ReducerMaker
from hpctrain.tasks.characters import Characters
from hpctrain.tasks.digits import Digits
from hpctrain.topology import Topology
from hpctrain.train import Decay, Schedule
from hpctrain.train.task.task import Fields, Task

# By rank: two that share memory, and enough nodes that a ring rounds sums on their way.
NODE_NAMES = ("a", "a", "b", "c")


@dataclass(frozen=True, kw_only=True)
class Course:
    """A task with its data and its recipe. bucket_bytes: several buckets, as the recipes have."""

    task: Task
    train: Fields
    held_out: Fields
    metric: str
    steps: int
    global_batch: int
    peak_lr: float
    warmup_steps: int
    final_fraction: float
    clip_norm: float | None
    bucket_bytes: int
    evaluation_batch: int


@functools.cache
def digits() -> Course:
    source = open_source("digits", held_out=None, seed=0)
    assert isinstance(source, ArraySource)
    parts = {
        part: {name: torch.from_numpy(array) for name, array in fields.items()}
        for part, fields in source.parts.items()
    }
    return Course(
        task=Digits(), train=parts["train"], held_out=parts["test"], metric="accuracy", steps=150, global_batch=64,
        peak_lr=2e-3, warmup_steps=20, final_fraction=0.0, clip_norm=None, bucket_bytes=250_000,
        evaluation_batch=512,
    )  # fmt: skip


@functools.cache
def characters(
    *,
    window: int = 64,
    width: int = 64,
    layers: int = 2,
    steps: int = 200,
    global_batch: int = 32,
    held_out_samples: int = 512,
) -> Course:
    source = open_source("python-source", held_out=None, seed=0)
    assert isinstance(source, TextSource)
    windows = {}
    for part, most in (("train", steps * global_batch), ("test", held_out_samples)):
        tokens = np.concatenate(list(read_tokens(source.parts[part])))
        whole = len(tokens) // (window + 1)
        cut = torch.from_numpy(tokens[: whole * (window + 1)].reshape(whole, window + 1))
        chosen = torch.randperm(whole, generator=torch.Generator().manual_seed(5))[:most]
        windows[part] = {"tokens": cut[chosen].clone()}
    return Course(
        task=Characters(window=window, width=width, layers=layers, heads=4), train=windows["train"],
        held_out=windows["test"], metric="nats_per_character", steps=steps, global_batch=global_batch, peak_lr=2e-3,
        warmup_steps=30, final_fraction=0.1, clip_norm=1.0, bucket_bytes=100_000, evaluation_batch=64,
    )  # fmt: skip


COURSES: dict[str, Callable[[], Course]] = {"digits": digits, "characters": characters}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training reached. bytes_per_step: by all ranks to other nodes."""

    algorithm: str
    quality: float
    bytes_per_step: float
    skipped: int
    parameters: list[torch.Tensor]


def train(course: Course, *, algorithm: Algorithm, wire: str) -> Outcome:
    """Train from the same start over the same batches, the gradients summed by `algorithm` and `wire`."""
    topology = Topology.from_node_names(NODE_NAMES)
    torch.manual_seed(1)
    first = course.task.build_model()
    models = [first, *(copy.deepcopy(first) for _ in NODE_NAMES[1:])]

    def rank_main(world: World) -> Outcome:
        reducer = ReducerMaker(world, topology=topology).make(algorithm, wire=wire)
        return _train(course, models[world.rank], reducer, world)

    outcomes = run_threads(topology.num_ranks, rank_main, timeout_s=600)
    for other in outcomes[1:]:
        assert all(map(torch.equal, other.parameters, outcomes[0].parameters)), f"ranks drifted apart: {wire}"
    return replace(outcomes[0], bytes_per_step=sum(outcome.bytes_per_step for outcome in outcomes))


def _train(course: Course, model: torch.nn.Module, reducer: BucketReducer, world: World) -> Outcome:
    optimizer = torch.optim.AdamW(model.parameters(), lr=course.peak_lr, weight_decay=0.01)
    updater = AllReduceUpdater(
        optimizer, comm=world, reducer=reducer, bucket_bytes=course.bucket_bytes, clip_norm=course.clip_norm
    )
    schedule = Schedule(
        peak_lr=course.peak_lr, total_steps=course.steps, warmup_steps=course.warmup_steps, decay=Decay.COSINE,
        final_fraction=course.final_fraction,
    )  # fmt: skip
    num_samples = len(next(iter(course.train.values())))
    order = torch.Generator().manual_seed(7)
    skipped = 0
    for step in range(course.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step)
        batch = torch.randperm(num_samples, generator=order)[: course.global_batch]
        own = batch.tensor_split(world.num_ranks)[world.rank]
        loss = course.task.loss(model, {name: field[own] for name, field in course.train.items()})
        updater.backward(loss, weight=len(own) / course.global_batch)
        skipped += not updater.step().applied
    updater.close()
    reducer.close()
    quality = _quality(course, model) if world.rank == 0 else 0.0
    return Outcome(
        algorithm=reducer.algorithm,
        quality=quality,
        bytes_per_step=reducer.bytes_sent() / course.steps,
        skipped=skipped,
        parameters=[p.detach() for p in model.parameters()],
    )


@torch.no_grad()
def _quality(course: Course, model: torch.nn.Module) -> float:
    num_samples = len(next(iter(course.held_out.values())))
    total = 0.0
    for part in torch.arange(num_samples).split(course.evaluation_batch):
        fields = {name: field[part] for name, field in course.held_out.items()}
        total += course.task.metrics(model, fields)[course.metric] * len(part)
    return total / num_samples
