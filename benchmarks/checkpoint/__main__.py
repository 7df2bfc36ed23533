"""`python -m benchmarks.checkpoint`: measures figures 1 to 4 of checkpoints, compared with peers and the disk."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.checkpoint import page, runs
from benchmarks.checkpoint.launch import RanksFailed
from benchmarks.command import finish, leave_on_sigterm, open_console, parser_of, saying
from benchmarks.results_file import Record, Run, about_this_run
from benchmarks.starting import REPOSITORY


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    console = open_console()
    say = saying(console)
    figures = [int(number) for number in arguments.only.split(",")]
    scale = runs.QUICK if arguments.quick else runs.FULL
    about = about_this_run(REPOSITORY, benchmark="checkpoint")
    about["versions"] |= {name: version(name) for name in ("safetensors", "h5py")}
    made: list[Record] = []
    failed: dict[str, list[str]] = {}
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-checkpoint-") as name:
        scratch = Path(name)

        parts: dict[int, Callable[[], list[Record]]] = {
            1: lambda: runs.saves(scratch, scale, say),
            2: lambda: runs.loads(scratch, scale, say),
            3: lambda: runs.background(scratch, scale, say),
            4: lambda: runs.replicas(scratch, scale, say),
        }
        for number in figures:
            try:
                made += parts[number]()
            except RanksFailed as error:
                say(f"figure {number} failed: {error}")
                failed[f"checkpoint.{number}"] = ["the whole figure"]
    run = Run(records=made, failed=failed)
    return finish(
        console, run, benchmark="checkpoint", about=about, output=arguments.output, refresh=page.refresh
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("checkpoint", description=__doc__, figures="1,2,3,4")
    parser.add_argument(
        "--directory", type=Path, default=REPOSITORY / "build", metavar="DIR",
        help="directory on the filesystem to be measured; at most 4 GB are written there and removed at the end",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    leave_on_sigterm()
    sys.exit(main())
