"""Shared by the benchmarks' commands: options, the table at the end, and writing of the results."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import headlines, results_file
from benchmarks.results_file import Run
from benchmarks.starting import REPOSITORY

Refresh = Callable[[Path, Mapping[str, Any]], None]
Say = Callable[[str], None]


def parser_of(benchmark: str, *, description: str | None, figures: str) -> argparse.ArgumentParser:
    """Returns the parser with the options that all benchmarks have. figures: the default of `--only`, such as
    `1,2,3`."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=description)
    parser.add_argument("--only", default=figures, metavar="1,2", help="figures to measure")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds and small sizes, to check that it runs"
    )
    parser.add_argument(
        "--output", type=Path, metavar="PATH",
        help=f"JSON file to write; records of other figures in it are kept. `make bench-{benchmark}` passes "
        f"benchmarks/results/{benchmark}.json; only then the tables of the docs page are written",
    )  # fmt: skip
    return parser


def leave_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit, so that `finally` blocks end the ranks and remove their files."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def open_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)


def saying(console: Console) -> Callable[[str], None]:
    """Returns a function that prints a line with the seconds since the call of `saying`."""
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
    refresh: Refresh | None,
) -> int:
    """Prints the records, writes them to `output`, and returns the exit code: 1 if a figure failed.

    about: machine, versions and commit, from `results_file.about_this_run`. refresh: updates the tables of the page in
    docs/benchmarks, if there is one. It is called, and the headline figures are written into docs/results.md and
    README.md, if `output` is the file in benchmarks/results.
    """
    table = Table("id", "what", "value", "rounds: range", "bar", "holds")
    for record in run.records:
        holds = "yes" if record.holds else "[red]no[/red]"
        rounds = f"{record.rounds}: {record.range[0]:.3g} to {record.range[1]:.3g}" if record.range else ""
        table.add_row(
            record.id, record.what, f"{record.value:.3g}", rounds, f"{record.sense} {record.bar:g}", holds
        )
    console.print(table)
    for figure, parts in run.failed.items():
        console.print(f"{figure}: not measured, because of an error: {', '.join(parts)}", markup=False)
    if output is not None:
        keep(run, benchmark=benchmark, about=about, output=output, refresh=refresh)
        console.print(f"written: {output}")
    return 1 if run.failed else 0


def keep(run: Run, *, benchmark: str, about: dict[str, Any], output: Path, refresh: Refresh | None) -> None:
    """Writes the records to `output`, and the tables that show them, as `finish` does. May be called again with more
    records of the same run, so that one that is interrupted keeps what was measured."""
    content = results_file.write(output, run, about=about)
    if output.resolve() == REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json":
        if refresh is not None:
            refresh(REPOSITORY / "docs" / "benchmarks" / f"{benchmark}.md", content)
        headlines.refresh()
