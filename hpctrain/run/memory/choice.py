"""Chooses among the ways to split a model: which fits, and what to write into the recipe. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.distributed import ParallelPlan
from hpctrain.run.memory.needs import Needs, RunSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to split the model. needs: None if the run would refuse it, with the reason in `refused`.

    drops_reduction: whether the recipe's section [reduction] has to go.
    """

    plan: ParallelPlan
    needs: Needs | None = None
    refused: str = ""
    drops_reduction: bool = False

    @property
    def name(self) -> str:
        """For example `parameters within node, checkpointing`."""
        within = " within node" if self.plan.shard_within == "node" else ""
        saving = ", checkpointing" if self.plan.activation_checkpointing == "blocks" else ""
        return f"{self.plan.shard}{within}{saving}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a way fits into memory. largest: samples of the largest micro-batch that fits, at most a rank's share; 0 if
    none does. micro_batches: that the recipe then needs, at least what it has."""

    way: Way
    largest: int
    micro_batches: int


def fit_of(way: Way, run: RunSizes, *, memory: int) -> Fit | None:
    """Returns how `way` fits into `memory` bytes; None if the run would refuse it."""
    if way.needs is None:
        return None
    largest = way.needs.largest_micro_batch(memory, at_most=run.samples)
    needed = math.ceil(run.samples / largest) if largest else 0
    return Fit(way=way, largest=largest, micro_batches=max(run.micro_batches, needed) if largest else 0)


def first_that_fits(ways: Sequence[Way], run: RunSizes, *, memory: int) -> Fit | None:
    """Returns the first of the ways that fits into `memory` bytes, with more micro-batches if it must be so."""
    fits = (fit_of(way, run, memory=memory) for way in ways)
    return next((fit for fit in fits if fit is not None and fit.largest), None)


def recipe_lines(fit: Fit, run: RunSizes) -> list[str]:
    """Returns the lines to write into the recipe. Empty: it needs neither [parallel] nor other micro-batches."""
    plan, usual, lines = fit.way.plan, ParallelPlan(), []
    for key in ("shard", "shard_within", "activation_checkpointing"):
        if getattr(plan, key) != getattr(usual, key):
            lines.append(f'{key} = "{getattr(plan, key)}"')
    if lines:
        lines.insert(0, "[parallel]")
    if fit.micro_batches != run.micro_batches:
        lines += ["[data]", f"micro_batches = {fit.micro_batches}"]
    return lines
