"""`python -m benchmarks.step`: the recipes of `examples/` as they stand, against every backend and algorithm."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from benchmarks.command import finish, open_console, parser_of, saying
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
# For Slurm a run that is stopped between its turns still has its cores.
MOST_RUNS = 20


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("step", description=__doc__, figures=",".join(CELLS))
    parser.add_argument("--minutes", type=float, default=45.0, help="no cell begins later than that")
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
    """Put each cell's records into `made`; whether all could be measured."""
    complete = True
    with working_directory() as directory, _places(say, directory) as place_of:
        for cell in cells:
            if time.monotonic() > until_s:
                say(f"{cell.name}: left out, the time is up; earlier results stay with their commit")
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
            except (
                Exception
            ) as error:  # whatever it is: the other cells are measured, this one's old records go
                say(f"{cell.name} failed: {error!r}")
                made.append(failed_record(cell, plain(repr(error))))
                complete = False
    return complete


@contextmanager
def _places(say: Say, directory: Path) -> Iterator[Callable[[Cell], Place | None]]:
    """Where a cell's ranks run, None where that cannot be. The cluster comes up for the first cell that needs it."""
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


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # by way of what ends the runs and removes their files


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
