"""Evaluates a task's metrics on a held-out dataset, exactly for any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from hpctrain.comm import Collective, all_gather_json, is_true_everywhere, raise_together
from hpctrain.data import Batch, Loader
from hpctrain.distributed import is_sharded, kept_whole, pipeline_of
from hpctrain.errors import DataError, HpctrainError, UsageError
from hpctrain.train.state.seeds import capture_generators, restore_generators
from hpctrain.train.task.task_runner import Runner

# Batches of checked data: the ranks agree on the number of damaged samples before they compute.


def agreed_batches(
    batches: Iterable[Batch],
    *,
    comm: Collective,
    waited: Callable[[float], None] = lambda seconds: None,
    counts_samples: bool = True,
) -> Iterator[Batch]:
    """Yields each batch with the number of damaged samples that all ranks have skipped in it.

    `Batch.weight` needs this number (`Batch.global_skipped`). Collective: each batch needs an all-reduce of two
    numbers. Raises the same error on every rank if a rank cannot read a batch, and DataError if all samples of a global
    batch are damaged.

    waited: function that is called with the seconds of each all-reduce.
    counts_samples: False if another rank reads the same samples as this rank and counts them.
    """
    iterator = iter(batches)
    while True:
        batch: Batch | None = None
        error: HpctrainError | None = None
        try:
            batch = next(iterator, None)
        except HpctrainError as caught:
            error = caught
        if batch is None and error is None:
            return  # every rank has the same number of batches
        skipped = batch.num_skipped if batch is not None and counts_samples else 0
        found = torch.tensor([skipped, error is not None], dtype=torch.int64)
        started = time.perf_counter()
        comm.all_reduce(found)
        waited(time.perf_counter() - started)
        num_skipped, failed = map(int, found)
        if failed:
            raise_together(comm, error)
        assert batch is not None
        if num_skipped == batch.global_samples:
            raise DataError(
                f"all {num_skipped} samples of the global batch at position {batch.start} of epoch {batch.epoch} "
                "are damaged: restore the dataset (hpctrain data verify lists what is damaged)",
                agreed=True,
            )
        yield replace(batch, global_skipped=num_skipped)


# Metrics over a held-out dataset, exact for any number of ranks.


def evaluate(
    runner: Runner, loader: Loader, *, comm: Collective, max_samples: int | None = None
) -> dict[str, float]:
    """Returns the means of the task's metrics over the samples of `loader`, each used once. Collective.

    If the task gives weights, a mean is sum(weight x metric) / sum(weight), where metrics of weight 0 are ignored.
    Samples that the loader skips as damaged are not in the means. Sums are added in rank order in float64, so that the
    result is the same on every rank.

    Raises UsageError on every rank if only some metrics come with weights. Raises DataError if there are no samples, if
    all samples have weight 0, or if the model is split and a rank has no samples in the first batch.

    max_samples: the evaluation ends after the first batches that together have at least so many samples, over all
    ranks. The same on every rank. None: all samples.
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
            elif previous is not None and together:  # computes its previous batch again
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
    """Raises DataError on every rank if a rank has no samples in the first batch. Collective.

    A rank without samples could not take part in forward, which is collective.
    """
    if not is_true_everywhere(comm, batch.num_samples > 0):
        raise DataError(
            "the first evaluation batch has no samples for a rank, which must take part in forward of a split model: "
            f"evaluate on at least {num_shares} samples, one per data-parallel rank",
            agreed=True,
        )
