"""`python -m benchmarks.parallel`: split models against one rank, formulas and peers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.command import finish, leave_on_sigterm, open_console, parser_of, saying
from benchmarks.parallel import page
from benchmarks.parallel.runs import FIGURES, Places, Say, places_for
from benchmarks.parallel.scale import FULL, QUICK, Scale
from benchmarks.parallel.timed.rounds import WrongTraining
from benchmarks.reduction.places import RanksFailed
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.starting import REPOSITORY
from tests.cluster import why_not


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("parallel", description=__doc__, figures=",".join(FIGURES))
    arguments = parser.parse_args(words)
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(FIGURES)}")
    scale = QUICK if arguments.quick else FULL
    console = open_console()
    say = saying(console)
    about = about_this_run(REPOSITORY, benchmark="parallel")
    with places_for(names, scale=scale, say=say, why_not=why_not()) as places:
        run = measure(names, places=places, scale=scale, say=say)
    return finish(
        console, run, benchmark="parallel", about=about, output=arguments.output, refresh=page.refresh
    )


def measure(names: Sequence[str], *, places: Places, scale: Scale, say: Say) -> Run:
    """Measures the parts of the figures one after another. If a part fails, the others are still measured."""
    made: list[Record] = []
    failed: dict[str, list[str]] = {}
    started: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in names:
        for title, run in FIGURES[name]:
            places.starts.clear()
            try:
                made += run(places, scale)
            except (RanksFailed, WrongTraining) as error:
                say(f"figure {name}, {title}: failed\n{error}")
                failed.setdefault(f"parallel.{name}", []).append(title)
                continue
            if places.starts:
                started.setdefault(f"parallel.{name}", {})[title] = [one.as_json() for one in places.starts]
            say(f"figure {name}: {title}")
    return Run(records=made, failed=failed, started=started)


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
