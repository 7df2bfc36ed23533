"""A plain Horovod script with a recipe's model, data and optimizer.

`python -m benchmarks.step.horovod_loop RECIPE DIRECTORY [--alone]`, under mpirun or srun.

Its buckets are those of hpctrain (`groups`), and it sends 16 bits per value if the recipe does. It writes step records
as a run of hpctrain does, and trains until it is killed. With `--alone` it does not use Horovod: each rank of mpirun
trains a model of its own on its share of every batch, without communication: an upper bound for the cores.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hpctrain.data import Dataset, Loader
from hpctrain.reduce.contract.bucket_plan import GradientSpec, plan_buckets, sum_dtype
from hpctrain.resilience import keep_freed_memory
from hpctrain.run.build import build_optimizer
from hpctrain.run.recipe.load import load_recipe
from hpctrain.run.recipe.schema import Recipe
from hpctrain.telemetry import RecordWriter, StepClock
from hpctrain.train import import_task


def bucket_bytes(recipe: Recipe) -> int:
    return int((recipe.reduction.bucket_mb or 4) * 1e6)


def parameter_groups(model: torch.nn.Module, recipe: Recipe) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters of each bucket, in the order in which backward computes their gradients."""
    parameters = list(model.parameters())
    specs = [GradientSpec(numel=p.numel(), dtype=sum_dtype(p.dtype)) for p in parameters]
    buckets = plan_buckets(specs, bucket_bytes=bucket_bytes(recipe))
    return [[parameters[slot.parameter] for slot in bucket.slots] for bucket in buckets]


def train(recipe: Recipe, directory: Path, *, alone: bool) -> None:
    half = recipe.reduction.wire == "fp16"
    # What is fused is what is sent: nothing that is larger than a bucket.
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(bucket_bytes(recipe) // (2 if half else 1))
    hvd = None
    if alone:
        keep_freed_memory()  # it is the upper bound for hpctrain's ranks
    else:
        import horovod.torch as hvd

        hvd.init()
    rank, num_ranks = _place(hvd)
    torch.manual_seed(recipe.run.seed)
    torch.use_deterministic_algorithms(recipe.run.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    task = import_task(recipe.task.target, options=recipe.task.options, search=[Path.cwd()])
    loader = Loader(
        Dataset.open(Path(recipe.data.train)), global_batch=recipe.data.global_batch, rank=rank,
        num_ranks=num_ranks, seed=recipe.run.seed,
    )  # fmt: skip
    model = task.build_model()
    optimizer: Any = build_optimizer(model, recipe.optimizer)
    if hvd is not None:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=hvd.Compression.fp16 if half else hvd.Compression.none,
            groups=parameter_groups(model, recipe),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    (directory / "metrics").mkdir(parents=True, exist_ok=True)
    records = RecordWriter(directory / "metrics" / f"rank-{rank:05}.jsonl")
    clock, step = StepClock(), 0
    for epoch in range(10**9):
        with loader.epoch(epoch) as batches:
            for batch in batches:
                optimizer.zero_grad()
                task.loss(model, batch.fields).backward()
                _apply(optimizer, model, clip_norm=recipe.optimizer.clip_norm, alone=alone)
                step += 1
                records.write(
                    {
                        "kind": "step", "time": time.time(), "step": step, "samples": batch.num_samples,
                        "seconds": clock.lap(),
                    }
                )  # fmt: skip


def _place(hvd: Any) -> tuple[int, int]:
    """Returns (rank, number of ranks): from Horovod, or from the variables of Open MPI's mpirun if `hvd` is None."""
    if hvd is not None:
        return hvd.rank(), hvd.size()
    return int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])


def _apply(optimizer: Any, model: torch.nn.Module, *, clip_norm: float | None, alone: bool) -> None:
    if clip_norm is None or alone:
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        return
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    with optimizer.skip_synchronize():
        optimizer.step()


if __name__ == "__main__":
    train(load_recipe(Path(sys.argv[1])), Path(sys.argv[2]), alone="--alone" in sys.argv[3:])
