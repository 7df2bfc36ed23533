"""`python -m benchmarks.reduction`: figures 1 to 4 of the reduction, against peers, in one run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import results_file as records
from benchmarks.reduction import page
from benchmarks.reduction.places import OnCluster, OneNode, RanksFailed
from benchmarks.reduction.runs import FIGURES, FULL, QUICK, Scale
from benchmarks.results_file import Record
from tests.cluster import Cluster, ClusterPlan, why_not
from tests.cluster.cluster import CLUSTERS
from tests.ranks_launcher import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results" / "reduction.json"
PAGE = REPOSITORY / "docs" / "benchmarks" / "reduction.md"


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    figures = [int(number) for number in arguments.only.split(",")]
    scale = QUICK if arguments.quick else FULL
    with _places(console, needed=figures != [3]) as (one_node, cluster):
        made, failed = _measure(console, figures, one_node=one_node, cluster=cluster, scale=scale)
    _show(console, made)
    if arguments.output is not None:
        content = records.write(arguments.output, made, repository=REPOSITORY)
        console.print(f"written: {arguments.output}")
        if arguments.output.resolve() == RESULTS:
            page.refresh(PAGE, content)
    return 1 if failed else 0


def _measure(
    console: Console, figures: Sequence[int], *, one_node: OneNode, cluster: OnCluster | None, scale: Scale
) -> tuple[list[Record], list[str]]:
    """The records, and what could not be measured."""
    made: list[Record] = []
    failed: list[str] = []
    for number in figures:
        for title, run in FIGURES[number]:
            started = time.monotonic()
            with console.status(f"figure {number}: {title}"):
                try:
                    found = run(one_node, cluster, scale)
                except RanksFailed as error:
                    console.print(f"figure {number}, {title}: failed\n{error}", markup=False)
                    failed.append(title)
                    continue
            made += found
            console.print(f"figure {number}: {title}, {time.monotonic() - started:.0f} s")
    return made, failed


def _show(console: Console, made: Sequence[Record]) -> None:
    table = Table("id", "what", "value", "bar", "holds")
    for record in made:
        holds = "yes" if record.holds else "[red]no[/red]"
        table.add_row(record.id, record.what, f"{record.value:.3g}", f"{record.sense} {record.bar:g}", holds)
    console.print(table)


@contextmanager
def _places(console: Console, *, needed: bool) -> Iterator[tuple[OneNode, OnCluster | None]]:
    """This machine, and a cluster where one can be made; else it is said why there is none."""
    reason = why_not() if needed else "not needed"
    if reason is not None:
        if needed:
            console.print(f"no cluster, so only what runs on one node is measured: {reason}")
        yield OneNode(), None
        return
    plan = ClusterPlan(
        directory=CLUSTERS / f"bench-{os.getpid()}", num_nodes=4, rate="1gbit", cores_per_node=4
    )
    with Cluster.up(plan) as up:
        yield OneNode(), OnCluster(up)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reduction", description=__doc__)
    parser.add_argument("--only", default="1,2,3,4", metavar="1,2", help="figures to measure")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to see that it runs")
    parser.add_argument(
        "--output", type=Path, metavar="PATH",
        help="JSON to write; records of other figures in it stay. `make bench-reduction` gives "
        "benchmarks/results/reduction.json, and only then the page's tables are written too",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
