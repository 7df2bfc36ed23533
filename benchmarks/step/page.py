"""Tables of docs/benchmarks/step.md: results of every cell, and how its ranks were started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results_page
from benchmarks.step.variants import CELLS, DEFAULT, PEER, YIELDING_PEER

NOTHING = results_page.NOT_MEASURED


def refresh(page: Path, content: Mapping[str, Any]) -> None:
    """Writes the tables of every cell, and machine and versions, into the page."""
    made = dict.fromkeys(names(), NOTHING) | tables(content["records"])
    results_page.refresh(page, content, more=made)


def names() -> list[str]:
    """Returns the names of all tables of the page except the first."""
    found = []
    for cell in CELLS.values():
        places = [f"{cell.name}.{rate}" if rate is not None else cell.name for rate in cell.rates]
        found += [cell.figure, f"started.{places[0]}", *(f"all.{place}" for place in places)]
    return found


def tables(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns name of the table -> its lines, for the tables with all variants."""
    found = {}
    for record in records:
        place, _, last = record["id"].removeprefix("step.").rpartition(".")
        if last == "default" and "screening samples/s" in record["samples"]:
            found[f"all.{place}"] = all_variants(record["samples"])
            found[f"started.{place}"] = started(record["samples"])
    return found


def all_variants(samples: Mapping[str, Any]) -> str:
    """Returns a table of all variants, fastest first: those with rounds by their median, then the others by their
    screening turn."""
    rounds, screening = samples["all samples/s"], samples["screening samples/s"]

    def place(name: str) -> tuple[bool, float]:
        return name not in rounds, -(median(rounds[name]) if name in rounds else screening[name])

    rows = [
        "| | what ran | samples/s, median | least | most | in the screening |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted(screening, key=place):
        three = " | | "
        if name in rounds:
            values = rounds[name]
            three = " | ".join(f"{value:,.0f}" for value in (median(values), min(values), max(values)))
        rows.append(f"| {name} | {samples['ran'].get(name, '')} | {three} | {screening[name]:,.0f} |")
    return "\n".join(rows)


def started(samples: Mapping[str, Any]) -> str:
    """Returns the command lines that started the unchanged recipe, with its variables, and Horovod's own loop."""
    lines = [samples["started"].get(DEFAULT, "")]
    variables = samples["variables"].get(DEFAULT, {})
    lines += [f"# in the ranks: {' '.join(f'{name}={value}' for name, value in variables.items())}"]
    lines += [samples["started"][name] for name in (PEER, YIELDING_PEER) if name in samples["started"]]
    return "\n".join(["```", *lines, "```"])
