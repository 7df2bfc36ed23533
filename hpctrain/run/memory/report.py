"""Shows the ways to split a model as a table, lines of text, and JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.distributed import ParallelPlan
from hpctrain.run.memory.calculate import (
    LayoutMemory,
    MemoryEstimates,
    Way,
    best_of_families,
    describe_cost,
    fit_of,
    recipe_lines,
    usual_fit,
)
from hpctrain.run.memory.layouts import FAMILY_KEYS
from hpctrain.run.memory.sizes import in_decimal_units

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "hpctrain.plan/2"
_SIZES = ("parameters", "gradients", "optimizer", "reduction", "activations", "other", "at once")


def memory_table(plan: MemoryEstimates, *, every: bool = False) -> Table:
    """Returns a table with one row per way to split the model over the ranks.

    The column "micro-batches" states the number of micro-batches per step with which the split fits into memory.

    A GB is 10^9 bytes, as everywhere in hpctrain.

    every: True: all ways are listed. False: of ways that differ only in activation checkpointing or schedule, only the
    first that fits is listed.
    """
    from rich.table import Table

    table = Table(title=_title(plan), title_justify="left")
    table.add_column("way")
    table.add_column("micro-batches", justify="right")
    for name in _SIZES:
        table.add_column(name, justify="right", no_wrap=True)
    if plan.memory is not None:
        table.add_column("fits")
    table.add_column("sent", justify="right", no_wrap=True)
    table.add_column("between nodes", justify="right", no_wrap=True)
    table.add_column("costs")
    for way in plan.ways if every else best_of_families(plan.ways, memory=plan.memory):
        if not way.refused:
            table.add_row(*_cells(way, plan))
        elif way.is_current:
            empty = [""] * (len(table.columns) - 2)
            table.add_row(f"{way.name} *", *empty, "refused, see below")
    return table


def _cells(way: Way, plan: MemoryEstimates) -> Iterator[str]:
    fit = fit_of(way, memory=plan.memory) if plan.memory is not None else None
    shown = fit or usual_fit(way)
    assert shown is not None
    needs = shown.needs
    yield way.name + (" *" if way.is_current else "")
    yield str(shown.micro_batches)
    for size in (needs.parameters, needs.gradients, needs.optimizer, needs.reduction):
        yield in_decimal_units(size)
    yield "?" if needs.activations is None else in_decimal_units(needs.activations)
    yield in_decimal_units(needs.other)
    yield in_decimal_units(needs.total)
    if plan.memory is not None:
        yield "no" if fit is None else "yes"
    yield in_decimal_units(needs.sent.total)
    yield in_decimal_units(needs.sent.between_nodes)
    yield describe_cost(shown)


def _title(plan: MemoryEstimates) -> str:
    place = plan.topology.describe() + (" with GPUs" if plan.device == "cuda" else " with CPUs")
    each = "" if plan.memory is None else f", {in_decimal_units(plan.memory)} for each rank"
    return f"{plan.model.num_elements:,} parameters, batches of {plan.run.global_batch} samples, on {place}{each}"


def memory_lines(plan: MemoryEstimates) -> list[str]:
    """Returns lines about assumptions and refusals, and the lines for the recipe if the memory is known."""
    lines = ["* as the recipe is now", *(f"note: {note}" for note in plan.notes)]
    lines += _refusals(plan.ways)
    if plan.memory is None:
        return [*lines, "With --memory this command also says what fits, and what to write into the recipe."]
    if plan.chosen is None:
        return [
            *lines,
            f"Nothing fits into {in_decimal_units(plan.memory)}, not even one sample at a time: take more ranks, more "
            "memory for each, or a smaller model",
        ]
    return [*lines, *_recommendation(plan, plan.chosen)]


def _recommendation(plan: MemoryEstimates, chosen: LayoutMemory) -> Iterator[str]:
    way, is_split = chosen.way, plan.own != ParallelPlan()
    own = plan.own.micro_batches if plan.own.pipeline > 1 else plan.run.micro_batches
    if way.is_current and chosen.micro_batches == own:
        yield "It fits as it is." if is_split else "It fits as it is, without a section [parallel]."
        return
    written = recipe_lines(chosen, micro_batches=plan.run.micro_batches)
    says = f"Recommended, the first that fits: {way.name}."
    if way.drops_reduction:
        says += " Leave the section [reduction] out, which does not apply to it."
    if is_split and "[parallel]" not in written:
        says += " Leave the section [parallel] out."
    yield f"{says} In the recipe:" if written else says
    if written:
        yield from ("", *written)
    current = next(usual_fit(way) for way in plan.ways if way.is_current)
    if current is not None and current.way is not way and current.needs.total <= (plan.memory or 0):
        yield from ("", f"As the recipe is now, {current.way.name}, it fits too.")


def _refusals(ways: Iterable[Way]) -> Iterator[str]:
    """Yields lines of text with the reasons why ways are refused, one line per reason.

    For all ways with split layers, and for all pipelines, only the first reason is given. The reason for the recipe's
    own way is always included.
    """
    reasons: dict[str, list[str]] = {}
    of_kind: dict[str, str] = {}
    for way in ways:
        if way.refused and way.is_current:
            yield f"{way.name} *: refused: {way.refused}"
        elif way.refused:
            plan = way.plan
            kind = "pipelines" if plan.pipeline > 1 else "split layers" if plan.tensor > 1 else ""
            reason = of_kind.setdefault(kind, way.refused) if kind else way.refused
            reasons.setdefault(reason, []).append(way.name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{', '.join(names[:3])}{more}: refused: {reason}"


def memory_document(plan: MemoryEstimates) -> dict[str, Any]:
    """Returns the plan as JSON values. All sizes are in bytes."""
    run = plan.run
    return {
        "schema": SCHEMA,
        "ranks": plan.topology.num_ranks,
        "nodes": plan.topology.num_nodes,
        "device": plan.device,
        "parameters": plan.model.num_elements,
        "buffer_bytes": plan.model.buffer_bytes,
        "global_batch": run.global_batch,
        "micro_batches": run.micro_batches,
        "memory_bytes": plan.memory,
        "reduction": run.reductions["none"].algorithm.value,
        "ways": [_way_document(way, plan) for way in plan.ways],
        "chosen": None if plan.chosen is None else _chosen_document(plan.chosen, plan),
        "notes": list(plan.notes),
    }


def _chosen_document(fit: LayoutMemory, plan: MemoryEstimates) -> dict[str, Any]:
    return {
        "way": fit.way.name,
        "micro_batches": fit.micro_batches,
        "recipe": recipe_lines(fit, micro_batches=plan.run.micro_batches),
        "without_reduction": fit.way.drops_reduction,
    }


def _way_document(way: Way, plan: MemoryEstimates) -> dict[str, Any]:
    split: dict[str, Any] = {
        "way": way.name,
        "is_current": way.is_current,
        **{key: getattr(way.plan, key) for key in (*FAMILY_KEYS, "activation_checkpointing")},
    }
    if way.plan.pipeline > 1:
        split["schedule"] = way.plan.schedule
    if way.refused:
        return {**split, "refused": way.refused}
    fit = fit_of(way, memory=plan.memory) if plan.memory is not None else None
    shown = fit or usual_fit(way)
    assert shown is not None
    needs = shown.needs
    sizes = asdict(needs)
    sizes.pop("sent")
    sizes.pop("gradients_stay")
    return {
        **split,
        "micro_batches": shown.micro_batches,
        "fits": None if plan.memory is None else fit is not None,
        "bytes": {**sizes, "total": needs.total},
        "sent": int(needs.sent.total),
        "sent_between_nodes": int(needs.sent.between_nodes),
        "waiting": shown.waiting,
        "costs": describe_cost(shown),
    }
