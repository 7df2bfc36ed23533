"""Tables that are specific to docs/benchmarks/overhead.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import results_page
from benchmarks.overhead.figures import KINDS


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Writes the tables of all figures, and machine and versions, into the page."""
    results_page.refresh(page, content, more=tables(content["records"]))


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns name of the table -> its lines."""
    samples = {record["id"]: record["samples"] for record in records}
    if "overhead.1d" not in samples:
        return {}
    return {"added": added(samples), "windows": windows(samples["overhead.1d"]["windows"])}


def added(samples: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the table of microseconds by part."""
    rows = [
        "| | added to a step, µs | 95% interval | in its own calls, µs | of the processor, µs "
        "| what comes every ten seconds, a step's share, µs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for letter, what in KINDS.values():
        paired, own = samples[f"overhead.1{letter}"], samples[f"overhead.2{letter}"]
        rows.append(
            f"| {what} | {_us(paired['median_s'])} | {_us(paired['low_s'])} to {_us(paired['high_s'])} "
            f"| {_us(own['wall_s'])} | {_us(own['cpu_s'])} | {_us(paired['windows_s'])} |"
        )
    without = samples["overhead.1d"]["without_s"]
    rows.append(
        f"| for comparison: the model's step without them | {_us(median(map(median, without)))} | | | | |"
    )
    return "\n".join(rows)


def windows(seconds: Mapping[str, Sequence[float]]) -> str:
    """Returns the table of what comes once in a window of steps."""
    names = {
        "stragglers": "all-gather of the times, and rank 0 judges 2 ranks",
        "guards": "all-gather of the samples at the end of an epoch",
    }
    rows = ["| | ms, mean | least | most |", "| --- | --- | --- | --- |"]
    for name, what in names.items():
        found = [1e3 * value for value in seconds[name]]
        rows.append(f"| {what} | {fmean(found):.3f} | {min(found):.3f} | {max(found):.3f} |")
    return "\n".join(rows)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"
