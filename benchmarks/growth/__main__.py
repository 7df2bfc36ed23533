"""`python -m benchmarks.growth`: measures the cost of a run with 2 to 48 ranks, and how it grows."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import results_page
from benchmarks.command import finish, open_console, parser_of, saying
from benchmarks.growth.figures import growth_records, planning_records
from benchmarks.growth.measure import Seen, build_counter, measure
from benchmarks.growth.planning import measure as measure_plan, plans
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.starting import REPOSITORY
from tests.faults.checkpoint.mounts import why_not

SIZES = (2, 4, 8, 16, 32, 48)
QUICK = (2, 4, 8)
BACKENDS = ("mpi", "horovod")
PLANNING = "planning"


def main(words: Sequence[str] | None = None) -> int:
    figures = ",".join((PLANNING, *BACKENDS))
    parser = parser_of("growth", description=__doc__, figures=figures)
    parser.add_argument("--ranks", metavar="2,4,8", help="numbers of ranks")
    arguments = parser.parse_args(words)
    sizes = (
        [int(n) for n in arguments.ranks.split(",")]
        if arguments.ranks
        else QUICK
        if arguments.quick
        else SIZES
    )
    names = arguments.only.split(",")
    if unknown := sorted(set(names) - {PLANNING, *BACKENDS}):
        parser.error(f"--only {unknown[0]}: there are {figures}")
    console = open_console()
    say = saying(console)
    about = about_this_run(REPOSITORY, benchmark="growth")
    records: list[Record] = []
    failed: dict[str, list[str]] = {}
    if PLANNING in names:
        records += planning_records({name: measure_plan(plan) for name, plan in plans().items()})
        say("planning measured")
    for backend in [name for name in BACKENDS if name in names]:
        if (reason := why_not()) is not None:
            failed[f"growth.{backend}"] = [reason]
            continue
        try:
            records += growth_records(backend, _measure(backend, sizes, say=say))
        except RuntimeError as error:
            say(f"{backend}: failed: {error}")
            failed[f"growth.{backend}"] = [str(error).splitlines()[0]]
    run = Run(records=records, failed=failed)
    return finish(
        console, run, benchmark="growth", about=about, output=arguments.output, refresh=results_page.refresh
    )


def _measure(backend: str, sizes: Sequence[int], *, say: Callable[[str], None]) -> list[Seen]:
    found = []
    directory = Path(tempfile.mkdtemp(prefix="hpctrain-growth-"))
    try:
        library = build_counter(directory)
        for num_ranks in sizes:
            place = directory / f"{backend}-{num_ranks}"
            place.mkdir()
            seen = measure(
                num_ranks, backend=backend, directory=place, library=library, hangs=num_ranks == max(sizes)
            )
            found.append(seen)
            say(
                f"{backend}, {num_ranks} ranks: started in {seen.start_s:.1f} s, {seen.received:,} bytes received"
            )
    finally:
        if "HPCTRAIN_KEEP" not in os.environ:
            shutil.rmtree(directory, ignore_errors=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
