"""`python -m benchmarks.step`: compares the recipes of `examples/`, unchanged, with every backend and algorithm."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.command import finish, leave_on_sigterm, open_console, parser_of, saying
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.starting import REPOSITORY
from benchmarks.step import page
from benchmarks.step.figures import failed_record, records_of
from benchmarks.step.measure import FULL, QUICK, Say, Scale, measure, plain, working_directory
from benchmarks.step.places import NODE_CORES, OnCluster, OneNode, Place
from benchmarks.step.variants import CELLS, RANKS_PER_NODE, Cell
from tests.cluster import Cluster, ClusterPlan, why_not
from tests.cluster.cluster import CLUSTERS

SEED = 20
# Cores of the Slurm job: a run that is stopped between its turns still occupies its cores.
MOST_RUNS = 20


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("step", description=__doc__, figures=",".join(CELLS))
    parser.add_argument("--minutes", type=float, default=45.0, help="time after which no further cell begins")
    arguments = parser.parse_args(words)
    console = open_console()
    say = saying(console)
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in CELLS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(CELLS)}")
    scale = QUICK if arguments.quick else FULL
    about = about_this_run(REPOSITORY, benchmark="step")
    made: list[Record] = []
    try:
        complete = _measure(
            [CELLS[name] for name in names], made=made, scale=scale, say=say,
            until_s=time.monotonic() + 60 * arguments.minutes,
        )  # fmt: skip
    finally:
        if made:
            run = Run(records=made)
            finish(console, run, benchmark="step", about=about, output=arguments.output, refresh=page.refresh)
    return 0 if complete else 1


def _measure(cells: Sequence[Cell], *, made: list[Record], scale: Scale, say: Say, until_s: float) -> bool:
    """Appends the records of each cell to `made`. Returns whether all cells were measured."""
    complete = True
    with working_directory() as directory, _places(say, directory) as place_of:
        for cell in cells:
            if time.monotonic() > until_s:
                say(f"{cell.name}: not measured, because --minutes are over; earlier results of it are kept")
                complete = False
                continue
            place = place_of(cell)
            if place is None:
                complete = False
                continue
            try:
                for found in measure(cell, place=place, directory=directory, scale=scale, seed=SEED, say=say):
                    made += records_of(cell, found)
                    complete = complete and not found.failed
            except Exception as error:
                # The other cells are still measured; older records of this one are removed.
                say(f"{cell.name} failed: {error!r}")
                made.append(failed_record(cell, plain(repr(error))))
                complete = False
    return complete


@contextmanager
def _places(say: Say, directory: Path) -> Iterator[Callable[[Cell], Place | None]]:
    """Yields a function that returns the place where a cell's ranks run, or None if it needs a cluster that cannot be
    made. The cluster is started for the first cell that needs it."""
    with ExitStack() as stack:
        up: list[OnCluster] = []

        def place_of(cell: Cell) -> Place | None:
            if not cell.on_cluster:
                return OneNode()
            reason = why_not()
            if reason is not None:
                say(f"{cell.name}: not measured, no cluster: {reason}")
                return None
            if not up:
                plan = ClusterPlan(
                    directory=CLUSTERS / f"bench-{os.getpid()}", num_nodes=cell.num_ranks // RANKS_PER_NODE,
                    cores_per_node=NODE_CORES * MOST_RUNS,
                )  # fmt: skip
                up.append(OnCluster(stack.enter_context(Cluster.up(plan, shared=[directory]))))
            return up[0]

        yield place_of


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
