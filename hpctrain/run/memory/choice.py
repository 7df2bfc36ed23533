"""Chooses among the ways to split a model: which fits, and what to write into the recipe. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpctrain.distributed import ParallelPlan
from hpctrain.run.memory.layouts import (
    COMPUTED_AGAIN,
    FAMILY_KEYS,
    family_of,
    name_of,
    waiting,
    with_micro_batches,
)
from hpctrain.run.memory.needs import Needs
from hpctrain.run.memory.sizes import in_decimal_units


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to split the model.

    choices: numbers of micro-batches to try, ascending, the first one unless memory is short; empty if the run would
    refuse it, with the reason in `refused`. needs: by number of micro-batches. drops_reduction: whether the recipe's
    section [reduction] has to go. is_current: whether the recipe asks for it now.
    """

    plan: ParallelPlan
    choices: Sequence[int] = ()
    needs: Callable[[int], Needs] | None = None
    refused: str = ""
    drops_reduction: bool = False
    is_current: bool = False

    @property
    def name(self) -> str:
        return name_of(self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A way with a number of micro-batches, and what a rank then needs."""

    way: Way
    micro_batches: int
    needs: Needs

    @property
    def plan(self) -> ParallelPlan:
        return with_micro_batches(self.way.plan, self.micro_batches)

    @property
    def waiting(self) -> float:
        """Part of a step in which a rank of the pipeline waits; of `zero-bubble` it is less."""
        return waiting(self.way.plan, micro_batches=self.micro_batches)


def usual_fit(way: Way) -> Fit | None:
    """Returns the way with the micro-batches to begin with; None if the run would refuse it."""
    if way.needs is None or not way.choices:
        return None
    return Fit(way=way, micro_batches=way.choices[0], needs=way.needs(way.choices[0]))


def fit_of(way: Way, *, memory: int) -> Fit | None:
    """Returns the way with as few micro-batches as fit into `memory` bytes; None if none do, or it is refused."""
    usual, needs = usual_fit(way), way.needs
    if usual is None or needs is None or usual.needs.total <= memory:
        return usual
    # From the second on more micro-batches never need more.
    others = way.choices[1:]
    place = bisect_left(others, True, key=lambda parts: needs(parts).total <= memory)
    if place == len(others):
        return None
    return Fit(way=way, micro_batches=others[place], needs=needs(others[place]))


def first_that_fits(ways: Iterable[Way], *, memory: int) -> Fit | None:
    """Returns the first of the ways that fits into `memory` bytes, with more micro-batches if it must be so."""
    fits = (fit_of(way, memory=memory) for way in ways)
    return next((fit for fit in fits if fit is not None), None)


def best_of_families(ways: Iterable[Way], *, memory: int | None) -> list[Way]:
    """Returns of ways that differ only in activation checkpointing and schedule the first that fits.

    If none does, that which needs least; without `memory`, the first that is not refused. The recipe's own way is there
    in any case.
    """
    families: dict[tuple[object, ...], list[Way]] = {}
    for way in ways:
        families.setdefault(family_of(way.plan), []).append(way)
    found = []
    for family in families.values():
        best = _best(family, memory=memory)
        found += [way for way in family if way is best or way.is_current]
    return found


def _best(ways: Sequence[Way], *, memory: int | None) -> Way:
    usual = [fit for way in ways if (fit := usual_fit(way)) is not None]
    if not usual:
        return ways[0]
    if memory is None:
        return usual[0].way
    chosen = first_that_fits(ways, memory=memory)
    return chosen.way if chosen is not None else min(usual, key=_least).way


def _least(fit: Fit) -> int:
    assert fit.way.needs is not None
    return fit.way.needs(fit.way.choices[-1]).total


def cost_of(fit: Fit) -> str:
    """Returns what the way costs besides messages, for example `computes a third more; waits 27 %`; may be empty."""
    plan, costs = fit.way.plan, []
    again = COMPUTED_AGAIN[plan.activation_checkpointing]
    if again is None:
        costs.append("computes a little more")
    elif again and plan.schedule == "zero-bubble":
        # Its backward is one for the inputs and one for each group of weights, and each computes the block's forward.
        costs.append("computes blocks several times")
    elif again:
        costs.append("computes a third more")
    if plan.offload:
        costs.append(f"copies from {in_decimal_units(fit.needs.host)} in host memory")
    if fit.waiting:
        less = "less than " if plan.schedule == "zero-bubble" else ""
        costs.append(f"waits {less}{fit.waiting:.0%}")
    return "; ".join(costs)


def recipe_lines(fit: Fit, *, micro_batches: int) -> list[str]:
    """Returns the lines to write into the recipe. Empty: it needs neither [parallel] nor other micro-batches.

    micro_batches: that the recipe's section [data] has.
    """
    plan, usual, lines = fit.plan, ParallelPlan(), []
    for key in (*FAMILY_KEYS, "schedule", "micro_batches", "activation_checkpointing"):
        value = getattr(plan, key)
        if value != getattr(usual, key) or (key == "schedule" and plan.pipeline > 1):
            lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}".lower())
    if lines:
        lines.insert(0, "[parallel]")
    of_data = 1 if plan.pipeline > 1 else fit.micro_batches
    if of_data != micro_batches:
        lines += ["[data]", f"micro_batches = {of_data}"]
    return lines
