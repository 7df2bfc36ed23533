"""Metrics over a whole held-out dataset, exact for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from hpctrain.comm import Collective, all_gather_json
from hpctrain.data import Loader
from hpctrain.errors import DataError
from hpctrain.train.agreed_batches import agreed_batches
from hpctrain.train.seeds import capture_generators, restore_generators
from hpctrain.train.task import Task


def evaluate(
    task: Task,
    model: torch.nn.Module,
    loader: Loader,
    *,
    comm: Collective,
    device: torch.device,
    dtype: torch.dtype | None = None,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    max_samples: int | None = None,
) -> dict[str, float]:
    """Means of `task.metrics` over every sample of `loader` once. Collective.

    dtype: of the floating-point fields that the task is handed; None: as they are stored.
    max_samples: only the first batches that have so many together; the same on every rank.
    Damaged samples that the loader leaves out are left out of the means.
    Sums are added in rank order in float64: the same number on every rank.
    """
    # Metrics may draw random numbers; training must go on as if nobody had looked.
    generators = capture_generators(device)
    sums: dict[str, float] = {}
    num_samples = 0
    was_training = model.training
    model.eval()
    with torch.no_grad(), loader.epoch(0) as batches:
        for batch in batches if loader.checker is None else agreed_batches(batches, comm=comm):
            if batch.num_samples > 0:
                with autocast():
                    found = task.metrics(model, batch.real().to(device, dtype=dtype).fields)
                for name, mean in found.items():
                    sums[name] = sums.get(name, 0.0) + float(mean) * batch.num_samples
                num_samples += batch.num_samples
            if max_samples is not None and batch.stop >= max_samples:
                break
    model.train(was_training)
    restore_generators(generators, device=device, otherwise=0)
    totals: dict[str, float] = {}
    seen = 0
    for theirs in all_gather_json(comm, {"sums": sums, "num_samples": num_samples}):
        seen += theirs["num_samples"]
        for name, value in theirs["sums"].items():
            totals[name] = totals.get(name, 0.0) + value
    if seen == 0:
        raise DataError("the held-out dataset has no samples to evaluate on", agreed=True)
    return {name: value / seen for name, value in totals.items()}
