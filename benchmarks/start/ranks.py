"""The program of a rank that starts MPI and leaves: `python -m benchmarks.start.ranks END [DIRECTORY]`.

END: INIT, it leaves as soon as MPI can be ended; LEFT, as Python does, which destroys all modules first. With a
folder each rank writes how it was started: `this_rank`, into `N.json`.
"""

from __future__ import annotations

import os
import sys

import hpctrain

INIT, LEFT = "init", "left"


def main(end: str, directory: str | None = None) -> None:
    with hpctrain.init(backend="mpi", device="cpu") as session:
        if directory is not None:
            import json
            from pathlib import Path

            from benchmarks.starting import this_rank

            Path(directory, f"{session.rank}.json").write_text(json.dumps(this_rank()))
    if end == INIT:
        from mpi4py import MPI

        MPI.Finalize()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
