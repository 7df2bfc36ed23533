"""`python -m benchmarks.checkpoint`: figures 1 to 3 of checkpoints, against peers and the disk, in one run."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from benchmarks import results_file
from benchmarks.checkpoint import page, runs
from benchmarks.checkpoint.launch import RanksFailed
from benchmarks.results_file import Record
from tests.ranks_launcher import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results" / "checkpoint.json"
PAGE = REPOSITORY / "docs" / "benchmarks" / "checkpoint.md"


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    began = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began:4.0f} s  {what}", markup=False)

    figures = [int(number) for number in arguments.only.split(",")]
    scale = runs.QUICK if arguments.quick else runs.FULL
    made: list[Record] = []
    failed = False
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-checkpoint-") as name:
        scratch = Path(name)

        parts: dict[int, Callable[[], list[Record]]] = {
            1: lambda: runs.saves(scratch, scale, say),
            2: lambda: runs.loads(scratch, scale, say),
            3: lambda: runs.background(scratch, scale, say),
        }
        for number in figures:
            try:
                made += parts[number]()
            except RanksFailed as error:
                say(f"figure {number} failed: {error}")
                failed = True
    _show(console, made)
    if arguments.output is not None:
        content = results_file.write(
            arguments.output,
            made,
            repository=REPOSITORY,
            benchmark="checkpoint",
            versions={name: version(name) for name in ("safetensors", "h5py")},
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--only", default="1,2,3", metavar="1,2", help="figures to measure")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to see that it runs")
    parser.add_argument(
        "--directory", type=Path, default=REPOSITORY / "build", metavar="DIR",
        help="where is written, 4 GB at most, on the filesystem to be measured; all is removed at the end",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="PATH",
        help="JSON to write; records of other figures in it stay. `make bench-checkpoint` gives "
        "benchmarks/results/checkpoint.json, and only then the page's tables are written too",
    )  # fmt: skip
    return parser


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # by way of what ends the ranks and removes their files


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
