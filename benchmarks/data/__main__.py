"""`python -m benchmarks.data`: figures 1 to 3 of reading data, against peers and the machine, in one run."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import results_file
from benchmarks.data import page, runs
from benchmarks.data.child import REPOSITORY, ReaderFailed
from benchmarks.data.peers_environment import peers_python
from benchmarks.results_file import Record

RESULTS = REPOSITORY / "benchmarks" / "results" / "data.json"
PAGE = REPOSITORY / "docs" / "benchmarks" / "data.md"


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    began = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {what}", markup=False)

    figures = [int(number) for number in arguments.only.split(",")]
    scale = runs.QUICK if arguments.quick else runs.FULL
    versions: dict[str, str] = {}
    made: list[Record] = []
    failed = False
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="bench-data-") as name:
        scratch = Path(name)

        def speeds() -> list[Record]:
            python = peers_python(arguments.peers)
            say("the peers' environment is there")
            found, of = runs.speeds(scratch, scale, python, say)
            versions.update(of)
            return found

        parts: dict[int, Callable[[], list[Record]]] = {
            1: speeds,
            2: lambda: runs.waits(scratch, scale, say),
            3: lambda: runs.costs(scratch, scale, say),
        }
        for number in figures:
            try:
                made += parts[number]()
            except (ReaderFailed, RuntimeError) as error:
                say(f"figure {number} failed: {error}")
                failed = True
    _show(console, made)
    if arguments.output is not None:
        content = results_file.write(
            arguments.output, made, repository=REPOSITORY, benchmark="data", versions=versions
        )
        console.print(f"written: {arguments.output}")
        if arguments.output.resolve() == RESULTS:
            page.refresh(PAGE, content)
    return 1 if failed else 0


def _show(console: Console, made: Sequence[Record]) -> None:
    table = Table("id", "what", "value", "bar", "holds")
    for record in made:
        holds = "yes" if record.holds else "[red]no[/red]"
        table.add_row(record.id, record.what, f"{record.value:.3g}", f"{record.sense} {record.bar:g}", holds)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--only", default="1,2,3", metavar="1,2", help="figures to measure")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to see that it runs")
    parser.add_argument(
        "--scratch", type=Path, default=REPOSITORY / "build", metavar="DIR",
        help="where the datasets are written, 3 GB, on the filesystem to be measured; they are removed at the end",
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=Path, default=REPOSITORY / "build" / "peers", metavar="DIR",
        help="the peers' environment; made if it is not there",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="PATH",
        help="JSON to write; records of other figures in it stay. `make bench-data` gives "
        "benchmarks/results/data.json, and only then the page's tables are written too",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
