"""`python -m benchmarks.reduction`: measures figures 1 to 4 of the reduction, compared with peers."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from benchmarks.command import finish, open_console, parser_of
from benchmarks.reduction import page
from benchmarks.reduction.places import OnCluster, OneNode, Place, RanksFailed
from benchmarks.reduction.runs import FIGURES, FULL, QUICK, Scale
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.starting import REPOSITORY
from tests.cluster import Cluster, ClusterPlan, why_not
from tests.cluster.cluster import CLUSTERS


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    console = open_console()
    about = about_this_run(REPOSITORY, benchmark="reduction")
    figures = [int(number) for number in arguments.only.split(",")]
    scale = QUICK if arguments.quick else FULL
    variables = dict(arguments.variable)
    with _places(console, needed=figures != [3], variables=variables) as (one_node, cluster):
        run = measure(console, figures, one_node=one_node, cluster=cluster, scale=scale)
    return finish(
        console, run, benchmark="reduction", about=about, output=arguments.output, refresh=page.refresh
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("reduction", description=__doc__, figures="1,2,3,4")
    parser.add_argument(
        "--variable", type=_variable, action="append", default=[], metavar="NAME=VALUE",
        help="environment variable of the ranks, for all methods: OMPI_MCA_mpi_yield_when_idle=1; may be repeated",
    )  # fmt: skip
    return parser


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


def measure(
    console: Console, figures: Sequence[int], *, one_node: OneNode, cluster: OnCluster | None, scale: Scale
) -> Run:
    """Measures the parts of the figures one after another. If a part fails, the others are still measured."""
    made: list[Record] = []
    failed: dict[str, list[str]] = {}
    started: dict[str, dict[str, list[dict[str, Any]]]] = {}
    places: list[Place] = [one_node, *([cluster] if cluster is not None else [])]
    for number in figures:
        figure = f"reduction.{number}"
        for title, run in FIGURES[number]:
            began = time.monotonic()
            for place in places:
                place.starts.clear()
            with console.status(f"figure {number}: {title}"):
                try:
                    found = run(one_node, cluster, scale)
                except RanksFailed as error:
                    console.print(f"figure {number}, {title}: failed\n{error}", markup=False)
                    failed.setdefault(figure, []).append(title)
                    continue
            made += found
            starts = [start.as_json() for place in places for start in place.starts]
            if starts:
                started.setdefault(figure, {})[title] = starts
            console.print(f"figure {number}: {title}, {time.monotonic() - began:.0f} s")
    return Run(records=made, failed=failed, started=started)


@contextmanager
def _places(
    console: Console, *, needed: bool, variables: Mapping[str, str]
) -> Iterator[tuple[OneNode, OnCluster | None]]:
    """Yields this machine, and a cluster if one can be made; otherwise prints why not."""
    reason = why_not() if needed else "not needed"
    if reason is not None:
        if needed:
            console.print(f"no cluster, so only the parts on one node are measured: {reason}")
        yield OneNode(variables=variables), None
        return
    plan = ClusterPlan(
        directory=CLUSTERS / f"bench-{os.getpid()}", num_nodes=4, rate="1gbit", cores_per_node=4
    )
    with Cluster.up(plan) as up:
        yield OneNode(variables=variables), OnCluster(up, variables=variables)


if __name__ == "__main__":
    sys.exit(main())
