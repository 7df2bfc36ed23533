"""`python -m benchmarks.reduction`: figures 1 to 4 of the reduction, against peers, in one run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from benchmarks.command import finish, open_console, parser_of
from benchmarks.reduction import page
from benchmarks.reduction.places import OnCluster, OneNode, RanksFailed
from benchmarks.reduction.runs import FIGURES, FULL, QUICK, Scale
from benchmarks.results_file import Record
from tests.cluster import Cluster, ClusterPlan, why_not
from tests.cluster.cluster import CLUSTERS


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser_of("reduction", description=__doc__, figures="1,2,3,4").parse_args(words)
    console = open_console()
    figures = [int(number) for number in arguments.only.split(",")]
    scale = QUICK if arguments.quick else FULL
    with _places(console, needed=figures != [3]) as (one_node, cluster):
        made, failed = _measure(console, figures, one_node=one_node, cluster=cluster, scale=scale)
    finish(console, made, benchmark="reduction", output=arguments.output, refresh=page.refresh)
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


if __name__ == "__main__":
    sys.exit(main())
