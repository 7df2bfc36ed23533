"""The ways to split a model as a table, lines of text, and JSON. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpctrain.run.memory.calculate import MemoryPlan
from hpctrain.run.memory.choice import Fit, Way, fit_of, recipe_lines

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "hpctrain.plan/1"


def memory_table(plan: MemoryPlan) -> Table:
    """Returns one line for each way, with the recipe's micro-batch; GB, as in all of hpctrain, are 10^9 bytes."""
    from rich.table import Table

    table = Table(title=_title(plan), title_justify="left")
    table.add_column("shard")
    for name in ("parameters", "gradients", "optimizer", "activations", "other", "total", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    if plan.memory is not None:
        table.add_column("fits")
    table.add_column("sent", justify="right", no_wrap=True)
    table.add_column("between nodes", justify="right", no_wrap=True)
    for way in plan.ways:
        table.add_row(*_cells(way, plan))
    return table


def _cells(way: Way, plan: MemoryPlan) -> list[str]:
    needs, samples = way.needs, plan.run.micro_batch
    if needs is None:
        return [way.name, *["-"] * 7, *(["refused"] if plan.memory is not None else []), "-", "-"]
    unsplit = plan.ways[0].needs
    total = needs.total(samples)
    saved = unsplit.total(samples) - total if unsplit is not None else 0
    activations = "?" if needs.activations is None else in_decimal_units(needs.activation_bytes(samples))
    held = [in_decimal_units(number) for number in (needs.parameters, needs.gradients, needs.optimizer)]
    cells = [way.name, *held, activations, in_decimal_units(needs.other(samples)), in_decimal_units(total)]
    cells.append(in_decimal_units(saved) if saved else "")
    if plan.memory is not None:
        cells.append(_fits(fit_of(way, plan.run, memory=plan.memory), plan))
    return [*cells, in_decimal_units(needs.sent), in_decimal_units(needs.sent_between_nodes)]


def _fits(fit: Fit | None, plan: MemoryPlan) -> str:
    if fit is None or not fit.largest:
        return "no"
    if fit.micro_batches == plan.run.micro_batches:
        return f"yes, up to {fit.largest} samples"
    return f"with {fit.micro_batches} micro-batches"


def _title(plan: MemoryPlan) -> str:
    run = plan.run
    place = plan.topology.describe() + (" with GPUs" if plan.device == "cuda" else " with CPUs")
    each = "" if plan.memory is None else f", {in_decimal_units(plan.memory)} for each rank"
    return (
        f"{plan.model.num_elements:,} parameters on {place}{each}; of a rank's {run.samples} samples {run.micro_batch} "
        "at a time"
    )


def memory_lines(plan: MemoryPlan) -> list[str]:
    """Returns what was assumed or refused, and what to write into the recipe if the memory was said."""
    lines = [f"note: {note}" for note in plan.notes]
    lines += [f"{way.name}: refused: {way.refused}" for way in plan.ways if way.refused]
    if plan.memory is None:
        return [*lines, "With --memory it says what fits, and what to write into the recipe."]
    if plan.chosen is None:
        return [
            *lines,
            f"Nothing fits into {in_decimal_units(plan.memory)}, not even one sample at a time: take more ranks, more "
            "memory for each, or a smaller model",
        ]
    way, written = plan.chosen.way, recipe_lines(plan.chosen, plan.run)
    if not written:
        return [*lines, "It fits as it is, without a section [parallel]."]
    drop = " Leave the section [reduction] out: FSDP2 reduces." if way.drops_reduction else ""
    return [*lines, f"The first way that fits: {way.name}.{drop} In the recipe:", "", *written]


def memory_document(plan: MemoryPlan) -> dict[str, Any]:
    """Returns the plan as JSON values; all sizes in bytes."""
    run = plan.run
    return {
        "schema": SCHEMA,
        "ranks": plan.topology.num_ranks,
        "nodes": plan.topology.num_nodes,
        "device": plan.device,
        "parameters": plan.model.num_elements,
        "buffer_bytes": plan.model.buffer_bytes,
        "samples": run.samples,
        "micro_batch": run.micro_batch,
        "memory_bytes": plan.memory,
        "reduction": run.reduction.algorithm.value,
        "ways": [_way_document(way, plan) for way in plan.ways],
        "chosen": None if plan.chosen is None else _chosen_document(plan.chosen, plan),
        "notes": list(plan.notes),
    }


def _chosen_document(fit: Fit, plan: MemoryPlan) -> dict[str, Any]:
    return {
        "way": fit.way.name,
        "micro_batches": fit.micro_batches,
        "recipe": recipe_lines(fit, plan.run),
        "without_reduction": fit.way.drops_reduction,
    }


def _way_document(way: Way, plan: MemoryPlan) -> dict[str, Any]:
    split = {
        "way": way.name,
        "shard": way.plan.shard,
        "shard_within": way.plan.shard_within,
        "activation_checkpointing": way.plan.activation_checkpointing,
    }
    needs, samples = way.needs, plan.run.micro_batch
    if needs is None:
        return {**split, "refused": way.refused}
    fit = fit_of(way, plan.run, memory=plan.memory) if plan.memory is not None else None
    return {
        **split,
        "bytes": {
            "parameters": needs.parameters,
            "gradients": needs.gradients,
            "optimizer": needs.optimizer,
            "activations": None if needs.activations is None else needs.activation_bytes(samples),
            "other": needs.other(samples),
            "total": needs.total(samples),
        },
        "activations": None if needs.activations is None else asdict(needs.activations),
        "other": {
            "buffers": needs.buffers, "whole_blocks": needs.whole, "reduction": needs.reduction,
            "data": needs.data, "snapshot": needs.snapshot, "update": needs.update, "start": needs.start,
        },
        "sent": needs.sent,
        "sent_between_nodes": needs.sent_between_nodes,
        "largest_micro_batch": None if fit is None else fit.largest,
    }  # fmt: skip


def in_decimal_units(num_bytes: float) -> str:
    """For example `1.23 GB`, `45 MB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if abs(num_bytes) >= unit:
            number = num_bytes / unit
            return f"{number:.0f} {name}" if abs(number) >= 100 else f"{number:.3g} {name}"
    return f"{num_bytes:.0f} B"
