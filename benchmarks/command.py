"""What the benchmarks' commands share: their options, the table at the end, and where the results go."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import results_file
from benchmarks.results_file import Run
from benchmarks.starting import REPOSITORY

Refresh = Callable[[Path, Mapping[str, Any]], None]


def parser_of(benchmark: str, *, description: str | None, figures: str) -> argparse.ArgumentParser:
    """figures: all that can be measured, `1,2,3`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=description)
    parser.add_argument("--only", default=figures, metavar="1,2", help="figures to measure")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to see that it runs")
    parser.add_argument(
        "--output", type=Path, metavar="PATH",
        help=f"JSON to write; records of other figures in it stay. `make bench-{benchmark}` gives "
        f"benchmarks/results/{benchmark}.json, and only then the page's tables are written too",
    )  # fmt: skip
    return parser


def open_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def saying(console: Console) -> Callable[[str], None]:
    """Prints what has been done, with the seconds since now."""
    began = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {what}", markup=False)

    return say


def finish(
    console: Console,
    run: Run,
    *,
    benchmark: str,
    about: dict[str, Any],
    output: Path | None,
    refresh: Refresh,
) -> int:
    """Show the records and write them; returns the exit code.

    about: of the tree that was measured, see `results_file.about_this_run`. refresh: of the page's tables, where the
    results are the repository's own.
    """
    table = Table("id", "what", "value", "bar", "holds")
    for record in run.records:
        holds = "yes" if record.holds else "[red]no[/red]"
        table.add_row(record.id, record.what, f"{record.value:.3g}", f"{record.sense} {record.bar:g}", holds)
    console.print(table)
    for figure, parts in run.failed.items():
        console.print(f"{figure}: failed, and not measured: {', '.join(parts)}", markup=False)
    if output is not None:
        content = results_file.write(output, run, about=about)
        console.print(f"written: {output}")
        if output.resolve() == REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json":
            refresh(REPOSITORY / "docs" / "benchmarks" / f"{benchmark}.md", content)
    return 1 if run.failed else 0
