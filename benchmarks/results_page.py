"""Writes tables of records between the markers of a page in docs/benchmarks. The text around them is written by
hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results_file import figure_of

NOT_MEASURED = "Not measured."
_MARKED = re.compile(r"(<!-- begin (?P<name>\S+) -->\n).*?(<!-- end (?P=name) -->)", re.S)


def refresh(page: Path, content: Mapping[str, Any], *, more: Mapping[str, str] | None = None) -> None:
    """Writes into the page: the table of each figure, machine and versions, how ranks were started, and the tables of
    `more` (name of the marker -> lines). Markers without results get the text `NOT_MEASURED`."""
    records: Sequence[Mapping[str, Any]] = content["records"]
    figures: Mapping[str, Mapping[str, Any]] = content.get("figures", {})
    tables = {"about": about(content), **(more or {})}
    for figure in sorted({figure_of(record["id"]) for record in records}):
        tables[figure] = table([record for record in records if figure_of(record["id"]) == figure])
    for figure, entry in figures.items():
        if "failed" in entry:
            failed = f"Failed, so not measured: {', '.join(entry['failed'])}."
            tables[figure] = f"{tables[figure]}\n\n{failed}" if figure in tables else failed
        if "started" in entry:
            tables[f"started.{figure}"] = started(entry["started"])
    fill(page, tables)


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Writes each table between the markers of its name; markers without one get the text `NOT_MEASURED`."""
    text = _MARKED.sub(
        lambda found: f"{found[1]}{tables.get(found['name'], NOT_MEASURED)}\n{found[3]}", page.read_text()
    )
    page.write_text(text)


def started(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns a list that says how the ranks of each part were started. parts: part -> `Start.as_json` of its
    launches."""
    titles: dict[str, list[str]] = {}
    for title, starts in parts.items():
        for start in starts:
            titles.setdefault(_start(start), []).append(title)
    return "\n".join(f"- {'; '.join(dict.fromkeys(names))}: {text}" for text, names in titles.items())


def _start(start: Mapping[str, Any]) -> str:
    ranks = "; ".join(map(_group, start["ranks"]))
    launched = f", which ran `{start['launched']}`" if start["launched"] else ""
    return f"`{start['command']}`{launched}. As the ranks found themselves: {ranks}."


def _group(ranks: Mapping[str, Any]) -> str:
    """Describes a group of ranks with equal settings."""
    facts = [
        _numbers("core", ranks["cores"]),
        f"{ranks['threads']} thread{'s' if ranks['threads'] != 1 else ''} each",
        f"preloaded: {', '.join(ranks['preload']) or 'nothing'}",
        *(f"`{name}={value}`" for name, value in ranks["variables"].items()),
    ]
    return f"{_numbers('rank', ranks['ranks'])}: {', '.join(facts)}"


def _numbers(what: str, numbers: Sequence[int]) -> str:
    """Returns `core 2`, `cores 0 to 3`, or each number if there are gaps: `cores 0, 2, 5`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{what}s {numbers[0]} to {numbers[-1]}"
    return f"{what}s {', '.join(map(str, numbers))}"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of a figure's records."""
    return markdown(
        ("id", "what", "value", "bar", "holds"),
        (
            (
                f"`{record['id']}`", record["what"], f"{record['value']:.3g}", f"{record['sense']} {record['bar']:g}",
                "yes" if record["holds"] else "**no**",
            )
            for record in records
        ),
    )  # fmt: skip


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of these columns."""
    ruled: list[Sequence[str]] = [heads, ["---"] * len(heads), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in ruled)


def spread(values: Sequence[float], form: str) -> list[str]:
    """Returns the cells with median, least and greatest value. form: of a number, such as `,.1f`."""
    return [f"{value:{form}}" for value in (median(values), min(values), max(values))]


def about(content: Mapping[str, Any]) -> str:
    machine, versions = content["machine"], content["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, Linux "
        f"{machine['kernel']}; {named}; commit `{short(content['commit'])}`{_other_commits(content['records'])}."
    )


def short(commit: str, *, digits: int = 12) -> str:
    """Returns a commit's first digits, and what says that there were uncommitted changes."""
    name, plus, changes = commit.partition("+")
    return name[:digits] + plus + changes


def _other_commits(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the figures that were measured at other commits, by commit."""
    figures: dict[str, set[str]] = {}
    for record in records:
        if "commit" in record:
            figures.setdefault(short(record["commit"]), set()).add(figure_of(record["id"]))
    return "".join(
        f"; of `{commit}`: {', '.join(sorted(names))}" for commit, names in sorted(figures.items())
    )
