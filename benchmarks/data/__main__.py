"""`python -m benchmarks.data`: measures figures 1 to 3 of reading data, compared with peers and raw reading."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import finish, open_console, parser_of, saying
from benchmarks.data import page, runs
from benchmarks.data.child import REPOSITORY
from benchmarks.data.peers_environment import peers_python
from benchmarks.results_file import Record, Run, about_this_run


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    console = open_console()
    say = saying(console)
    figures = [int(number) for number in arguments.only.split(",")]
    scale = runs.QUICK if arguments.quick else runs.FULL
    about = about_this_run(REPOSITORY, benchmark="data")
    made: list[Record] = []
    failed: dict[str, list[str]] = {}
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="bench-data-") as name:
        scratch = Path(name)

        def speeds() -> list[Record]:
            python = peers_python(arguments.peers)
            say("the peers' environment is ready")
            found, of = runs.speeds(scratch, scale, python, say)
            about["versions"] |= of
            return found

        parts: dict[int, Callable[[], list[Record]]] = {
            1: speeds,
            2: lambda: runs.waits(scratch, scale, say),
            3: lambda: runs.costs(scratch, scale, say),
        }
        for number in figures:
            try:
                made += parts[number]()
            except (RuntimeError, subprocess.SubprocessError) as error:
                say(f"figure {number} failed: {error}")
                failed[f"data.{number}"] = ["the whole figure"]
    run = Run(records=made, failed=failed)
    return finish(console, run, benchmark="data", about=about, output=arguments.output, refresh=page.refresh)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("data", description=__doc__, figures="1,2,3")
    parser.add_argument(
        "--scratch", type=Path, default=REPOSITORY / "build", metavar="DIR",
        help="directory on the filesystem to be measured; datasets of 3 GB are written there and removed at the end",
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=Path, default=REPOSITORY / "build" / "peers", metavar="DIR",
        help="the peers' Python environment; made if it is missing",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
