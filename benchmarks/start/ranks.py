"""The program of a rank that starts MPI and leaves: `python -m benchmarks.start.ranks [DIRECTORY]`.

With a folder, each rank writes how it was started: `this_rank`, into `N.json`.
"""

from __future__ import annotations

import sys

import hpctrain


def main(directory: str | None = None) -> None:
    with hpctrain.start(backend="mpi", device="cpu") as session:
        if directory is not None:
            import json
            from pathlib import Path

            from benchmarks.starting import this_rank

            Path(directory, f"{session.rank}.json").write_text(json.dumps(this_rank()))


if __name__ == "__main__":
    main(*sys.argv[1:])
