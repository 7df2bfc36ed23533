"""`python -m benchmarks.checkpoint`: figures 1 to 4 of checkpoints, against peers and the disk, in one run."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from benchmarks.checkpoint import page, runs
from benchmarks.checkpoint.launch import RanksFailed
from benchmarks.command import finish, open_console, parser_of, saying
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
        help="where is written, 4 GB at most, on the filesystem to be measured; all is removed at the end",
    )  # fmt: skip
    return parser


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # by way of what ends the ranks and removes their files


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main())
