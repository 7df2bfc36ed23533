"""A plain training script with a recipe's model, data and optimizer, as a user of another library writes it.

`python -m benchmarks.step.peer_loop RECIPE DIRECTORY horovod|ddp|alone [--best]`, under mpirun or srun.

`horovod` is `hvd.DistributedOptimizer`, `ddp` is PyTorch's DistributedDataParallel on Gloo. Both send 16 bits per value
if the recipe does. With `--best` they have what their documentation offers for speed: a fused optimizer; DDP also
buckets of the recipe's size, gradients that are views of the buckets, a static graph, and no broadcast of buffers.
With `alone` each rank of mpirun trains a model of its own on its share of every batch, without communication: an upper
bound for the cores.

It writes step records as a run of hpctrain does, and trains until it is killed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.data import Dataset, Loader
from hpctrain.reduce import use_fused_kernels
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets, sum_dtype
from hpctrain.resilience import keep_freed_memory
from hpctrain.run.build import build_optimizer
from hpctrain.run.recipe.load import load_recipe
from hpctrain.run.recipe.schema import Recipe
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.train import import_task


@dataclass(frozen=True, slots=True)
class Library:
    """How a library trains.

    rank, num_ranks: of this process. wrap: returns the model to call and the optimizer to step. step: clips the norm of
    the mean gradient, unless it is None, and steps the optimizer.
    """

    rank: int
    num_ranks: int
    wrap: Callable[[torch.nn.Module, torch.optim.Optimizer], tuple[torch.nn.Module, Any]]
    step: Callable[[Any, torch.nn.Module, float | None], None]


def bucket_bytes(recipe: Recipe) -> int:
    return int((recipe.reduction.bucket_mb or 4) * 1e6)


def parameter_groups(model: torch.nn.Module, recipe: Recipe) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters of each bucket, in the order in which backward computes their gradients."""
    parameters = list(model.parameters())
    specs = [GradientSpec(numel=p.numel(), dtype=sum_dtype(p.dtype)) for p in parameters]
    buckets = plan_buckets(specs, bucket_bytes=bucket_bytes(recipe))
    return [[parameters[slot.parameter] for slot in bucket.slots] for bucket in buckets]


def of_mpirun() -> tuple[int, int]:
    """Returns rank and number of ranks, from the variables of Open MPI's mpirun, or of srun."""
    environ = os.environ
    rank = environ.get("OMPI_COMM_WORLD_RANK") or environ.get("SLURM_PROCID") or "0"
    return int(rank), int(environ.get("OMPI_COMM_WORLD_SIZE") or environ.get("SLURM_NTASKS") or "1")


def clip_and_step(optimizer: Any, model: torch.nn.Module, clip_norm: float | None) -> None:
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()


def alone(recipe: Recipe) -> Library:
    keep_freed_memory()  # it is the upper bound for hpctrain's ranks
    return Library(*of_mpirun(), lambda model, optimizer: (model, optimizer), clip_and_step)


def horovod(recipe: Recipe) -> Library:
    half = recipe.reduction.wire == "fp16"
    # What is fused is what is sent: nothing that is larger than a bucket.
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(bucket_bytes(recipe) // (2 if half else 1))
    import horovod.torch as hvd

    hvd.init()

    def wrap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, Any]:
        wrapped = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.fp16 if half else hvd.Compression.none,
            groups=parameter_groups(model, recipe),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, wrapped

    def step(optimizer: Any, model: torch.nn.Module, clip_norm: float | None) -> None:
        if clip_norm is None:
            optimizer.step()
            return
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        with optimizer.skip_synchronize():
            optimizer.step()

    return Library(hvd.rank(), hvd.size(), wrap, step)


def ddp(recipe: Recipe, directory: Path, *, best: bool) -> Library:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    rank, num_ranks = of_mpirun()
    store = (directory / "store").absolute().as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)

    def wrap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, Any]:
        options: dict[str, Any] = {}
        if best:
            options = {
                "bucket_cap_mb": bucket_bytes(recipe) / 2**20, "gradient_as_bucket_view": True,
                "static_graph": True, "broadcast_buffers": False,
            }  # fmt: skip
        wrapped = torch.nn.parallel.DistributedDataParallel(model, **options)
        if recipe.reduction.wire == "fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped, optimizer

    return Library(rank, num_ranks, wrap, clip_and_step)


def train(recipe: Recipe, directory: Path, name: str, *, best: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    library = ddp(recipe, directory, best=best) if name == "ddp" else LIBRARIES[name](recipe)
    torch.manual_seed(recipe.run.seed)
    torch.use_deterministic_algorithms(recipe.run.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    task = import_task(recipe.task.target, options=recipe.task.options, search=[Path.cwd()])
    loader = Loader(
        Dataset.open(Path(recipe.data.train)), global_batch=recipe.data.global_batch, rank=library.rank,
        num_ranks=library.num_ranks, seed=recipe.run.seed,
    )  # fmt: skip
    model = task.build_model()
    optimizer: Any = build_optimizer(model, recipe.optimizer)
    if best:
        use_fused_kernels(optimizer)
    called, optimizer = library.wrap(model, optimizer)
    (directory / "metrics").mkdir(parents=True, exist_ok=True)
    records = RecordWriter(directory / "metrics" / f"rank-{library.rank:05}.jsonl")
    clock, step = StepClock(), 0
    for epoch in range(10**9):
        with loader.epoch(epoch) as batches:
            for batch in batches:
                optimizer.zero_grad()
                task.loss(called, batch.fields).backward()
                library.step(optimizer, model, recipe.optimizer.clip_norm)
                step += 1
                records.write(
                    {
                        "kind": "step", "time": time.time(), "step": step, "samples": batch.num_samples,
                        "seconds": clock.lap(),
                    }
                )  # fmt: skip


LIBRARIES: dict[str, Callable[[Recipe], Library]] = {"horovod": horovod, "alone": alone}


if __name__ == "__main__":
    train(load_recipe(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3], best="--best" in sys.argv[4:])
