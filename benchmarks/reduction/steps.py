"""Times training steps with each method of reducing, alternating with steps without communication, in blocks in
shuffled order: of a small transformer and an MLP, with random batches."""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional

from benchmarks.reduction.suite import PER_STEP
from hpctrain.run import Session
from hpctrain.tasks.characters import Characters

# ---------------------------------------------------------------------- the models

NUM_SYMBOLS = 96
CONTEXT = 64
TEXT = Characters(window=CONTEXT, vocabulary=NUM_SYMBOLS, width=256, layers=4)  # 3.2 million parameters
FEATURES = 1024
HIDDEN = 2048
NUM_BATCHES = 8


def make_mlp() -> nn.Module:
    """Returns an MLP of 8.4 million parameters."""
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, FEATURES),
    )  # fmt: skip


Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, batches for one rank, and the function that computes the loss of a batch."""

    make: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], list[Batch]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _texts(count: int) -> Callable[[torch.Generator], list[Batch]]:
    def batches(generator: torch.Generator) -> list[Batch]:
        texts = torch.randint(NUM_SYMBOLS, (NUM_BATCHES, count, CONTEXT + 1), generator=generator)
        return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]

    return batches


def _vectors(count: int) -> Callable[[torch.Generator], list[Batch]]:
    def batches(generator: torch.Generator) -> list[Batch]:
        def drawn() -> torch.Tensor:
            return torch.randn(count, FEATURES, generator=generator)

        return [(drawn(), drawn()) for _ in range(NUM_BATCHES)]

    return batches


def _of_characters(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


WORKLOADS = {
    "transformer": Workload(
        make=TEXT.build_model, batches=_texts(PER_STEP["transformer"]), loss=_of_characters
    ),
    "mlp": Workload(make=make_mlp, batches=_vectors(PER_STEP["mlp"]), loss=functional.mse_loss),
}

# ---------------------------------------------------------------------- the steps

LEARNING_RATE = 0.01
COUNTED = 2  # timed steps of each turn, after one that is not timed
# Largest difference between a method's parameters after the run and those of plain MPI. Other orders of summation and
# 16 bits cause small differences; a reduction that does nothing causes a far larger one.
TOLERANCE = 0.1


@dataclass(kw_only=True)
class Stepper:
    """A method of training a model of its own. begin, end: called before and after a block of steps; collective."""

    name: str
    model: torch.nn.Module
    step: Callable[[Batch], None]
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    num_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A method, and the same training of another copy of the model without communication."""

    stepper: Stepper
    without: Stepper


def time_steps(
    comm: Any, pairs: Sequence[Pair], *, batches: Sequence[Batch], num_rounds: int, block: int, seed: int
) -> dict[str, dict[str, list[list[list[float]]]]]:
    """Returns by method: seconds of its timed steps (`steps`), and of the alternating steps without communication
    (`without`), each of shape (rounds, steps, ranks).

    Steps with and without communication alternate after a few steps, since other load on the machine changes from one
    second to the next by more than the measured difference. The first step of a turn is not timed, because the caches
    hold the other model. A barrier precedes each step, as the end of the previous step is one in training.
    """
    order = random.Random(seed)
    found: dict[str, dict[str, list[list[list[float]]]]] = {
        pair.stepper.name: {"steps": [], "without": []} for pair in pairs
    }
    for _ in range(num_rounds):
        for pair in order.sample(list(pairs), len(pairs)):
            pair.stepper.begin()
            times: dict[str, list[float]] = {"steps": [], "without": []}
            for number in range(1 + math.ceil(block / COUNTED)):
                turns = [("steps", pair.stepper), ("without", pair.without)]
                for kind, stepper in turns if number % 2 else reversed(turns):
                    found_now = [_timed_step(comm, stepper, batches) for _ in range(1 + COUNTED)]
                    if number:  # Horovod is started again in every block
                        times[kind] += found_now[1:]
            comm.Barrier()
            pair.stepper.end()
            for kind, mine in times.items():
                found[pair.stepper.name][kind].append(
                    [list(step) for step in zip(*comm.allgather(mine), strict=True)]
                )
    return found


def _timed_step(comm: Any, stepper: Stepper, batches: Sequence[Batch]) -> float:
    comm.Barrier()
    started = time.perf_counter()
    stepper.step(batches[stepper.num_steps % len(batches)])
    seconds = time.perf_counter() - started
    stepper.num_steps += 1
    return seconds


class WrongTraining(RuntimeError):
    """A method's parameters differ from those of the others, so its time is not valid."""


def check(comm: Any, steppers: Sequence[Stepper], *, start: torch.Tensor) -> None:
    """Raises WrongTraining unless all ranks, and all methods that reduce, have about the same parameters. Collective.

    start: the parameters before the first step, shape (numel,).
    """
    reference = next(flat(stepper.model) for stepper in steppers if stepper.name == "mpi-fp32")
    moved = float((reference - start).norm())
    for stepper in steppers:
        mine = flat(stepper.model)
        of_first = comm.bcast(mine.numpy() if comm.Get_rank() == 0 else None, root=0)
        apart = float((mine - torch.from_numpy(of_first)).norm()) / moved
        off = float((mine - reference).norm()) / moved
        if comm.allreduce(apart) > 1e-6 or comm.allreduce(off) > TOLERANCE:
            raise WrongTraining(
                f"{stepper.name}: parameters differ by {apart:.2g} between ranks, by {off:.2g} from plain MPI"
            )


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def make_pairs(
    comm: Any, session: Session, *, workload: Workload, seed: int, methods: Sequence[str]
) -> list[Pair]:
    """Makes the methods with these names, each with models of its own that start from the same parameters.
    Collective."""
    makers: dict[str, Callable[[], Stepper]] = {"mpi-fp32": lambda: mpi_stepper(comm, workload, seed=seed)}
    for bits in (32, 16):
        makers |= {
            f"ours-fp{bits}": functools.partial(our_stepper, session, workload, seed=seed, wire=f"fp{bits}"),
            f"ddp-fp{bits}": functools.partial(_ddp, workload, seed=seed, bits=bits),
            f"horovod-fp{bits}": functools.partial(_horovod, comm, workload, seed=seed, bits=bits),
        }
    return [Pair(stepper=makers[name](), without=_plain(workload, seed=seed)) for name in methods]


def _fresh(workload: Workload, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = workload.make()
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def _plain(workload: Workload, *, seed: int) -> Stepper:
    """Returns the stepper without communication."""
    model, optimizer = _fresh(workload, seed)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        workload.loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return Stepper(name="none", model=model, step=step)


def mpi_stepper(comm: Any, workload: Workload, *, seed: int) -> Stepper:
    """Returns the stepper with one MPI_Allreduce after backward; gradients are views of its buffer, so nothing is
    copied.

    The loss is divided by the number of ranks, as in hpctrain, instead of every gradient.
    """
    from mpi4py import MPI

    model, optimizer = _fresh(workload, seed)
    parameters = list(model.parameters())
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    num_ranks = comm.Get_size()

    def step(batch: Batch) -> None:
        buffer.zero_()
        loss = workload.loss(model(batch[0]), batch[1])
        loss.backward(torch.full_like(loss, 1 / num_ranks))
        comm.Allreduce(MPI.IN_PLACE, buffer.numpy(), op=MPI.SUM)
        optimizer.step()

    return Stepper(name="mpi-fp32", model=model, step=step)


def our_stepper(session: Session, workload: Workload, *, seed: int, wire: str) -> Stepper:
    model, optimizer = _fresh(workload, seed)
    updater = session.distributed_optimizer(model, optimizer, wire=wire)

    def step(batch: Batch) -> None:
        updater.backward(workload.loss(model(batch[0]), batch[1]), weight=1 / session.world_size)
        updater.step()

    return Stepper(name=f"ours-{wire}", model=model, step=step, close=updater.close)


def _ddp(workload: Workload, *, seed: int, bits: int) -> Stepper:
    model, optimizer = _fresh(workload, seed)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if bits == 16:
        wrapped.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        workload.loss(wrapped(batch[0]), batch[1]).backward()
        optimizer.step()

    return Stepper(name=f"ddp-fp{bits}", model=model, step=step)


def _horovod(comm: Any, workload: Workload, *, seed: int, bits: int) -> Stepper:
    import horovod.torch as hvd

    model, plain = _fresh(workload, seed)
    name = f"horovod-fp{bits}"
    hvd.init(comm)
    optimizer = hvd.DistributedOptimizer(
        plain,
        named_parameters=[(f"{name}.{part}", parameter) for part, parameter in model.named_parameters()],
        compression=hvd.Compression.fp16 if bits == 16 else hvd.Compression.none,
    )
    hvd.shutdown()

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        workload.loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return Stepper(name=name, model=model, step=step, begin=lambda: hvd.init(comm), end=hvd.shutdown)
