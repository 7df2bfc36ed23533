"""`python -m benchmarks.overhead`: what the agreement on a stop, the comparison of the ranks and the guards cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.command import finish, open_console, parser_of, saying
from benchmarks.overhead import page
from benchmarks.overhead.figures import judging_records, step_records
from benchmarks.reduction.places import OneNode, RanksFailed
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.starting import REPOSITORY

SEED = 20
TIMEOUT_S = 280.0
# Five kinds of steps of 50 ms: 1.3 s a round.
STEPS = {"rounds": 80, "block": 5, "windows": 200, "seed": SEED}
QUICK_STEPS = {**STEPS, "rounds": 2, "windows": 5}
JUDGING = {"ranks": [4, 1000, 10_000], "repeats": 20, "seed": SEED}


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("overhead", description=__doc__, figures="1,2,3")
    arguments = parser.parse_args(words)
    wanted = set(arguments.only.split(","))
    if unknown := sorted(wanted - {"1", "2", "3"}):
        parser.error(f"--only {unknown[0]}: there are 1, 2 (measured together with 1) and 3")
    console = open_console()
    say = saying(console)
    about = about_this_run(REPOSITORY, benchmark="overhead")
    place = OneNode(module="benchmarks.overhead.ranks")
    steps = QUICK_STEPS if arguments.quick else STEPS
    parts: dict[str, Callable[[], list[Record]]] = {
        "1": lambda: step_records(place.run("steps", steps, timeout_s=TIMEOUT_S)),
        "3": lambda: judging_records(place.run("judging", JUDGING, timeout_s=TIMEOUT_S)),
    }
    made: list[Record] = []
    failed: dict[str, list[str]] = {}
    started: dict[str, dict[str, object]] = {}
    for number, measure in parts.items():
        figures = ("1", "2") if number == "1" else (number,)
        if not wanted & {*figures}:
            continue
        place.starts.clear()
        try:
            made += measure()
        except RanksFailed as error:
            say(f"figure {number} failed: {error}")
            failed |= {f"overhead.{figure}": ["the whole figure"] for figure in figures}
            continue
        started[f"overhead.{number}"] = {"all": [start.as_json() for start in place.starts]}
        say(f"figure{'s' if len(figures) > 1 else ''} {' and '.join(figures)} measured")
    run = Run(records=made, failed=failed, started=started)
    return finish(
        console, run, benchmark="overhead", about=about, output=arguments.output, refresh=page.refresh
    )


if __name__ == "__main__":
    sys.exit(main())
