"""Metrics over a held-out dataset, exact for any number of ranks."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.comm import Collective, all_gather_json, is_true_everywhere
from hpctrain.data import Batch, Loader
from hpctrain.distributed import is_sharded, kept_whole, pipeline_of
from hpctrain.errors import DataError, UsageError
from hpctrain.train.loop.agreed_batches import agreed_batches
from hpctrain.train.state.seeds import capture_generators, restore_generators
from hpctrain.train.task.runner import Runner


def evaluate(
    runner: Runner, loader: Loader, *, comm: Collective, max_samples: int | None = None
) -> dict[str, float]:
    """Returns the means of the task's metrics over the samples of `loader`, each used once. Collective.

    If the task gives weights, the means are sum(weight x metric) / sum(weight); metrics of weight 0 are not used.
    max_samples: use only the first batches that together have this many samples; the same on every rank.
    Damaged samples that the loader leaves out are not in the means.
    Sums are added in rank order in float64, so the result is the same on every rank.
    Raises UsageError on every rank if only some metrics come with weights; DataError if there are no samples or all
    have weight 0; with a model that is split over the ranks also if the first
    batch has none for a rank.
    """
    # Metrics may draw random numbers; training must not depend on whether there was an evaluation.
    model = runner.model
    generators = capture_generators(runner.device)
    sums: dict[str, float] = {}
    num_samples = 0
    weights = 0.0
    kinds: set[bool] = set()  # whether metrics came with a weight
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
                if found is not None:
                    metrics, weight = found
                    kinds.add(weight is not None)
                    counts = batch.num_samples if weight is None else weight
                    for name, mean in metrics.items() if counts else ():
                        sums[name] = sums.get(name, 0.0) + float(mean) * counts
                    num_samples += batch.num_samples
                    weights += weight or 0.0
                previous = batch
            elif previous is not None and together:  # computes again what it had before
                runner.metrics(previous)
            if max_samples is not None and batch.stop >= max_samples:
                break
    model.train(was_training)
    restore_generators(generators, device=runner.device, otherwise=0)
    totals: dict[str, float] = {}
    seen, total = 0, 0.0
    mine: dict[str, Any] = {"sums": {}, "num_samples": 0, "weights": 0.0, "kinds": []}
    if runner.counts_samples:
        mine = {"sums": sums, "num_samples": num_samples, "weights": weights, "kinds": sorted(kinds)}
    everyones = all_gather_json(comm, mine)
    given = {kind for theirs in everyones for kind in theirs["kinds"]}
    if len(given) == 2:
        raise UsageError(
            "the task's metrics come with a weight on some ranks or batches and without on others: return "
            "(metrics, weight) each time",
            agreed=True,
        )
    for theirs in everyones:
        seen += theirs["num_samples"]
        total += theirs["weights"]
        for name, value in theirs["sums"].items():
            totals[name] = totals.get(name, 0.0) + value
    if seen == 0:
        raise DataError("the held-out dataset has no samples to evaluate on", agreed=True)
    if given == {True} and total == 0:
        raise DataError(
            "all metrics of the held-out dataset have weight 0: there is nothing to average", agreed=True
        )
    return {name: value / (total if given == {True} else seen) for name, value in totals.items()}


def _check_first(batch: Batch, *, comm: Collective, num_shares: int) -> None:
    """Raises DataError on every rank if the first batch has no samples for one: what could it compute? Collective."""
    if not is_true_everywhere(comm, batch.num_samples > 0):
        raise DataError(
            "the first evaluation batch has no samples for a rank, which must take part in forward of a split model: "
            f"evaluate on at least {num_shares} samples, one for each rank that has its own",
            agreed=True,
        )
