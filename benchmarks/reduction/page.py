"""Tables that are specific to docs/benchmarks/reduction.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results_page


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Writes the tables of all figures, and machine and versions, into the page."""
    results_page.refresh(page, content, more=raw_tables(content["records"]))


def raw_tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the tables of the times of all methods: name of the table -> its lines."""
    tables = {}
    for record in records:
        samples = record["samples"]
        if record["id"].startswith("reduction.2.") and "seconds of all" in samples:
            tables[f"times.{record['id'].split('.')[2]}"] = _times(samples["seconds of all"])
        if record["id"].startswith("reduction.3.") and "slowed by" in samples:
            tables[f"steps.{record['id'].split('.')[2]}"] = _steps(samples)
    return tables


def _times(seconds: Mapping[str, Sequence[float]]) -> str:
    rows = ["| | median ms | fastest | slowest |", "| --- | --- | --- | --- |"]
    for name in sorted(seconds, key=lambda name: median(seconds[name])):
        ms = [1000 * value for value in seconds[name]]
        rows.append(f"| {name} | {median(ms):.1f} | {min(ms):.1f} | {max(ms):.1f} |")
    return "\n".join(rows)


def _steps(samples: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        "| | slowed by | median step, ms | without communication, alternating, ms |",
        "| --- | --- | --- | --- |",
    ]
    slowed = samples["slowed by"]
    steps, without = samples["median step s"], samples["without communication s"]
    for name in sorted(slowed, key=lambda name: slowed[name]):
        rows.append(
            f"| {name} | {slowed[name] - 1:.1%} | {1000 * steps[name]:.1f} | {1000 * without[name]:.1f} |"
        )
    return "\n".join(rows)
