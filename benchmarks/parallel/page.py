"""Tables that are specific to docs/benchmarks/parallel.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results_page
from benchmarks.parallel.timed.methods import METHODS


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Writes the tables of all figures, and machine and versions, into the page."""
    results_page.refresh(page, content, more=tables(content["records"]))


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns name of the table -> its lines."""
    found = {}
    if memory := [record for record in records if record["id"].startswith("parallel.2.")]:
        found["memory"] = _memory(memory)
    if times := [r for r in records if r["id"].startswith("parallel.4.") and r["id"].endswith(".best")]:
        found["times"] = _times(times)
    return found


def _memory(records: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        "| layout and ranks | formula, MB | held by a rank, MB | peak in a step, MB |",
        "| --- | --- | --- | --- |",
    ]
    for record in records:
        samples = record["samples"]
        formula = samples["held_bytes"][0] / (1 + samples["off"][0])
        held, peak = (
            " to ".join(f"{size / 1e6:.0f}" for size in sorted({min(sizes), max(sizes)}))
            for sizes in (samples["held_bytes"], samples["peak_bytes"])
        )
        rows.append(f"| {record['id'].removeprefix('parallel.2.')} | {formula / 1e6:.0f} | {held} | {peak} |")
    return "\n".join(rows)


def _times(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns milliseconds of a step by method, and a column for each place."""
    places = [record["id"].removeprefix("parallel.4.").removesuffix(".best") for record in records]
    rows = [f"| ms, median of the rounds | {' | '.join(places)} |", f"| --- |{' --- |' * len(places)}"]
    for name, method in METHODS.items():
        cells = [
            f"{1e3 * median(record['samples'][name]):.0f}" if name in record["samples"] else ""
            for record in records
        ]
        if any(cells):
            whose = "ours" if method.layout is not None else "on Gloo"
            rows.append(f"| {method.what}, {whose} | {' | '.join(cells)} |")
    return "\n".join(rows)
