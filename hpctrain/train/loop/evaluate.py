"""Metrics over a held-out dataset, exact for any number of ranks."""

from __future__ import annotations

import torch

from hpctrain.comm import Collective, all_gather_json, is_true_everywhere
from hpctrain.data import Batch, Loader
from hpctrain.distributed import is_sharded, kept_whole, pipeline_of
from hpctrain.errors import DataError
from hpctrain.train.loop.agreed_batches import agreed_batches
from hpctrain.train.state.seeds import capture_generators, restore_generators
from hpctrain.train.task.runner import Runner


def evaluate(
    runner: Runner, loader: Loader, *, comm: Collective, max_samples: int | None = None
) -> dict[str, float]:
    """Returns the means of the task's metrics over the samples of `loader`, each used once. Collective.

    max_samples: use only the first batches that together have this many samples; the same on every rank.
    Damaged samples that the loader leaves out are not in the means.
    Sums are added in rank order in float64, so the result is the same on every rank.
    Raises DataError on every rank if there are no samples; with a model that is split over the ranks also if the first
    batch has none for a rank.
    """
    # Metrics may draw random numbers; training must not depend on whether there was an evaluation.
    model = runner.model
    generators = capture_generators(runner.device)
    sums: dict[str, float] = {}
    num_samples = 0
    previous: Batch | None = None
    # Forward is collective.
    together = is_sharded(model) or pipeline_of(model) is not None
    was_training = model.training
    model.eval()
    with torch.no_grad(), kept_whole(model), loader.epoch(0) as batches:
        checked = loader.checker is not None
        agreed = agreed_batches(batches, comm=comm, counts_samples=runner.counts_samples)
        for batch in agreed if checked else batches:
            if together and previous is None:
                _check_first(batch, comm=comm, num_shares=loader.num_ranks)
            if batch.num_samples > 0:
                found = runner.metrics(batch)
                for name, mean in (found or {}).items():
                    sums[name] = sums.get(name, 0.0) + float(mean) * batch.num_samples
                num_samples += batch.num_samples if found is not None else 0
                previous = batch
            elif previous is not None and together:  # computes again what it had before
                runner.metrics(previous)
            if max_samples is not None and batch.stop >= max_samples:
                break
    model.train(was_training)
    restore_generators(generators, device=runner.device, otherwise=0)
    totals: dict[str, float] = {}
    seen = 0
    mine = (
        {"sums": sums, "num_samples": num_samples}
        if runner.counts_samples
        else {"sums": {}, "num_samples": 0}
    )
    for theirs in all_gather_json(comm, mine):
        seen += theirs["num_samples"]
        for name, value in theirs["sums"].items():
            totals[name] = totals.get(name, 0.0) + value
    if seen == 0:
        raise DataError("the held-out dataset has no samples to evaluate on", agreed=True)
    return {name: value / seen for name, value in totals.items()}


def _check_first(batch: Batch, *, comm: Collective, num_shares: int) -> None:
    """Raises DataError on every rank if the first batch has no samples for one: what could it compute? Collective."""
    if not is_true_everywhere(comm, batch.num_samples > 0):
        raise DataError(
            "the first evaluation batch has no samples for a rank, which must take part in forward of a split model: "
            f"evaluate on at least {num_shares} samples, one for each rank that has its own",
            agreed=True,
        )
