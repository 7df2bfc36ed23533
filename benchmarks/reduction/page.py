"""The tables of docs/benchmarks/reduction.md, between its markers. Text around them is written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reduction.records import figure_of


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Write every figure's table, and what the numbers are of, into the page."""
    text = page.read_text()
    records: Sequence[Mapping[str, Any]] = content["records"]
    tables = {"about": about(content), **raw_tables(records)}
    for figure in sorted({figure_of(record["id"]) for record in records}):
        tables[figure] = table([record for record in records if figure_of(record["id"]) == figure])
    for name, lines in tables.items():
        marked = re.compile(rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.S)
        text = marked.sub(lambda found, lines=lines: f"{found[1]}{lines}\n{found[2]}", text)  # type: ignore[misc]
    page.write_text(text)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    rows = ["| id | what | value | bar | holds |", "| --- | --- | --- | --- | --- |"]
    for record in records:
        holds = "yes" if record["holds"] else "**no**"
        rows.append(
            f"| `{record['id']}` | {record['what']} | {record['value']:.3g} | {record['sense']} {record['bar']:g} "
            f"| {holds} |"
        )
    return "\n".join(rows)


def about(content: Mapping[str, Any]) -> str:
    machine, versions = content["machine"], content["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, Linux "
        f"{machine['kernel']}; {named}; commit `{content['commit'][:12]}`."
    )


def raw_tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """All methods' times of the figures that compare them: name of the table -> its lines."""
    tables = {}
    for record in records:
        samples = record["samples"]
        if record["id"].startswith("reduction.2.") and "seconds of all" in samples:
            tables[f"times.{record['id'].split('.')[2]}"] = _times(samples["seconds of all"])
        if record["id"].startswith("reduction.3.") and "median step s" in samples:
            tables[f"steps.{record['id'].split('.')[2]}"] = _steps(samples["median step s"])
    return tables


def _times(seconds: Mapping[str, Sequence[float]]) -> str:
    rows = ["| | median ms | fastest | slowest |", "| --- | --- | --- | --- |"]
    for name in sorted(seconds, key=lambda name: median(seconds[name])):
        ms = [1000 * value for value in seconds[name]]
        rows.append(f"| {name} | {median(ms):.1f} | {min(ms):.1f} | {max(ms):.1f} |")
    return "\n".join(rows)


def _steps(steps: Mapping[str, float]) -> str:
    rows = ["| | median step, ms | more than without communication, ms |", "| --- | --- | --- |"]
    for name in sorted(steps, key=lambda name: steps[name]):
        rows.append(f"| {name} | {1000 * steps[name]:.1f} | {1000 * (steps[name] - steps['none']):.1f} |")
    return "\n".join(rows)
