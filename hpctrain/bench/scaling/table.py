"""Prints a scaling document: a table of the sizes, and lines on the laws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from hpctrain.bench.scaling.document import ScalingDocument
from hpctrain.bench.spread import show_number

_PARTS = ("input", "compute", "bubble", "exposed_sync", "other")


def scaling_table(document: ScalingDocument) -> Table:
    """Table with one line per number of ranks; the title states the baseline and what an interval is."""
    settings = document.settings
    sizes = document.sizes
    rounds = max((size.repeats for size in sizes), default=0)
    ranks = f"{document.baseline_ranks} rank{'s' * (document.baseline_ranks > 1)}"
    table = Table(
        title=f"{document.recipe['run']['name']}: {settings.mode} scaling, {rounds} interleaved "
        f"round{'s' * (rounds != 1)} of {settings.steps} steps after {settings.warmup_steps}; relative to {ranks}, "
        "[95% t interval] of the rounds' ratios",
        title_justify="left",
    )
    for name in ("ranks", "nodes", "batch", "samples/s", "step, ms", "speedup", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    # Only pipelines have bubbles, and documents of versions before them have no such part.
    parts = [name for name in _PARTS if name != "bubble" or any(size.seconds.get(name) for size in sizes)]
    for name in parts:
        table.add_column(name.removesuffix("_sync"), justify="right", no_wrap=True)
    for size in sizes:
        table.add_row(
            str(size.ranks),
            str(size.nodes),
            str(size.global_batch),
            _with_range(size.samples_per_s, "q1", "q3", show_number),
            show_number(1e3 * size.step_s["median"]),
            _with_range(size.speedup, "low", "high", lambda value: f"{value:.2f}"),
            _with_range(size.efficiency, "low", "high", lambda value: f"{value:.0%}"),
            *(f"{size.seconds[name] / size.seconds['step']:.1%}" for name in parts),
        )
    return table


def scaling_lines(document: ScalingDocument) -> list[str]:
    """Lines below the table: fitted laws, which one to use and why, what was checked, notes."""
    lines = []
    if document.fits is not None:
        lines += [_law_line(law, chosen=document.fits["chosen"]) for law in document.fits["laws"]]
        lines.append(f"law: {document.fits['chosen'] or 'none'}: {document.fits['why']}")
        chosen = next((law for law in document.fits["laws"] if law["law"] == document.fits["chosen"]), None)
        if chosen is not None:
            shown = ", ".join(f"{value:.0%} on {ranks}" for ranks, value in chosen["predicted"].items())
            lines.append(f"beyond what was measured, if it holds there: efficiency {shown} ranks")
    if document.samples is not None:
        lines.append(f"checked over {document.samples.runs} runs: {document.samples.rule}")
    lines += document.notes
    if not document.complete:
        lines.append("not complete: --resume measures the rounds that are left")
    return lines


def _law_line(law: Mapping[str, Any], *, chosen: str | None) -> str:
    parts = [f"{_parameter(p)}" for p in law["parameters"]]
    parts.append("no residual" if law["residual"] is None else f"residual {law['residual']:.1%}")
    parts.append("no AICc" if law["aicc"] is None else f"AICc {law['aicc']:.1f}")
    if law["peak_ranks"] is not None:
        parts.append(f"fastest on {law['peak_ranks']:.0f} ranks")
    mark = "*" if law["law"] == chosen else " "
    return f"{mark} {law['law']}: {law['formula']}; {', '.join(parts)}"


def _parameter(parameter: Mapping[str, Any]) -> str:
    value = f"{parameter['name']} = {parameter['value']:.3g}"
    if parameter["error"] is not None:
        return f"{value} +- {parameter['error']:.2g}"
    return f"{value} (at its bound)" if parameter["at_bound"] else value


def _with_range(values: Mapping[str, Any], low: str, high: str, show: Callable[[float], str]) -> str:
    middle = show(values["median"] if "median" in values else values["value"])
    if values[low] is None or values[low] == values[high]:
        return middle
    brackets = "[]" if low == "low" else "()"
    return f"{middle} {brackets[0]}{show(values[low])}-{show(values[high])}{brackets[1]}"
