"""Tables of records in a page of docs/benchmarks, between its markers. Text around them is written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_file import figure_of


def refresh(page: Path, content: Mapping[str, Any], *, more: Mapping[str, str] | None = None) -> None:
    """Write every figure's table, what the numbers are of, and `more` (name -> lines) into the page."""
    text = page.read_text()
    records: Sequence[Mapping[str, Any]] = content["records"]
    tables = {"about": about(content), **(more or {})}
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
        f"{machine['kernel']}; {named}; commit `{content['commit'][:12]}`{_other_commits(content['records'])}."
    )


def _other_commits(records: Sequence[Mapping[str, Any]]) -> str:
    """What was measured earlier and kept, by the commit it is of."""
    figures: dict[str, set[str]] = {}
    for record in records:
        if "commit" in record:
            figures.setdefault(record["commit"][:12], set()).add(figure_of(record["id"]))
    return "".join(
        f"; of `{commit}`: {', '.join(sorted(names))}" for commit, names in sorted(figures.items())
    )
