"""Tables that are specific to docs/benchmarks/data.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results_page

# Id of a record whose samples are the rates of all methods -> name of its table.
SPEEDS = {
    "data.1a": "warm.images", "data.1d": "warm.volumes", "data.1e": "warm.tokens", "data.1f": "warm.gzip-in-order",
    "data.1g": "warm.gzip-shuffled", "data.1.cold.images": "cold.images", "data.1.cold.volumes": "cold.volumes",
    "data.1.cold.tokens": "cold.tokens",
}  # fmt: skip


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Writes the tables of all figures, and machine and versions, into the page."""
    results_page.refresh(page, content, more=speed_tables(content["records"]))


def speed_tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the tables of samples/s by method: name of the table -> its lines."""
    return {
        SPEEDS[record["id"]]: _rates(record["samples"]["samples/s"])
        for record in records
        if record["id"] in SPEEDS
    }


def _rates(rates: Mapping[str, Sequence[float]]) -> str:
    rows = ["| | samples/s, median | slowest round | fastest round |", "| --- | --- | --- | --- |"]
    for name in sorted(rates, key=lambda name: -median(rates[name])):
        found = rates[name]
        rows.append(f"| {name} | {median(found):,.0f} | {min(found):,.0f} | {max(found):,.0f} |")
    return "\n".join(rows)
