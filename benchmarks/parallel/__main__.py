"""`python -m benchmarks.parallel`: split models against one rank, formulas and peers; Horovod scripts on hpctrain."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import finish, keep, leave_on_sigterm, open_console, parser_of, saying
from benchmarks.parallel import page
from benchmarks.parallel.runs import FIGURES, Part, Places, Say, places_for
from benchmarks.parallel.scale import FULL, QUICK, Scale
from benchmarks.places import RanksFailed
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
    output: Path | None = arguments.output

    def keep_measured(run: Run) -> None:
        if output is not None:
            keep(run, benchmark="parallel", about=about, output=output, refresh=page.refresh)

    with places_for(names, scale=scale, say=say, why_not=why_not()) as places:
        run = measure(names, places=places, scale=scale, say=say, after_part=keep_measured)
    return finish(console, run, benchmark="parallel", about=about, output=output, refresh=page.refresh)


def measure(
    names: Sequence[str],
    *,
    places: Places,
    scale: Scale,
    say: Say,
    after_part: Callable[[Run], None],
    parts: Mapping[str, Sequence[tuple[str, Part]]] = FIGURES,
) -> Run:
    """Measures the parts of the figures one after another, and calls `after_part` with the run so far after each.

    If a part fails, or some of it, the others are still measured, and the run names what failed.
    """
    made: list[Record] = []
    failed: dict[str, list[str]] = {}
    started: dict[str, dict[str, list[dict[str, Any]]]] = {}
    run = Run()
    for name in names:
        figure = f"parallel.{name}"
        for title, measure_part in parts[name]:
            places.starts.clear()
            places.failed.clear()
            try:
                made += measure_part(places, scale)
            except Exception as error:  # whatever it is, it is not to lose the other figures
                known = isinstance(error, RanksFailed)
                say(f"figure {name}, {title}: failed\n{error if known else traceback.format_exc()}")
                failed.setdefault(figure, []).append(title)
            else:
                say(f"figure {name}: {title}")
            if places.failed:
                failed.setdefault(figure, []).extend(f"{title}: {what}" for what in places.failed)
            if places.starts:
                started.setdefault(figure, {})[title] = [one.as_json() for one in places.starts]
            run = Run(records=made, failed=failed, started=started)
            after_part(run)
    return run


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
