"""The tables of docs/benchmarks/checkpoint.md that only it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results_page

# Records whose samples have every way's seconds -> name of the table, bytes of the state.
TABLES = {
    "checkpoint.1a": ("saves.512mib", 512 << 20), "checkpoint.1d": ("saves.small", 10_000 * 4096),
    "checkpoint.1.1-rank": ("saves.1-rank", 512 << 20), "checkpoint.1.4-ranks": ("saves.4-ranks", 512 << 20),
    "checkpoint.1.2gib": ("saves.2gib", 2 << 30), "checkpoint.2a": ("loads.warm", 512 << 20),
    "checkpoint.2b": ("loads.cold", 512 << 20),
}  # fmt: skip


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Write every figure's table, and what the numbers are of, into the page."""
    results_page.refresh(page, content, more=tables(content["records"]))


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name of the table -> its lines."""
    found = {}
    for record in records:
        if record["id"] in TABLES:
            name, num_bytes = TABLES[record["id"]]
            found[name] = times(record["samples"]["seconds"], num_bytes=num_bytes)
    return found


def times(seconds: Mapping[str, Sequence[float]], *, num_bytes: int) -> str:
    rows = [
        "| | ms, median | fastest round | slowest round | MB/s, median |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in sorted(seconds, key=lambda name: median(seconds[name])):
        found = [1e3 * value for value in seconds[name]]
        rate = num_bytes / median(seconds[name]) / 1e6
        rows.append(
            f"| {name} | {median(found):,.0f} | {min(found):,.0f} | {max(found):,.0f} | {rate:,.0f} |"
        )
    return "\n".join(rows)
