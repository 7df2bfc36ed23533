"""Prints how long sums of 1 MB take with the MPI of each environment, and with that of
`make setup`, 4 ranks on this machine.

    bash scripts/mpis.sh mpich impi -- sums --rounds 9

The environments take turns, a launch each; a figure is the median over the rounds, a ratio the median of the rounds'
ratios to the first environment. Each launch measures `auto`, and chooses its algorithm itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.starting import REPOSITORY, run_to_end, user_environment

_TIMEOUT_S = 300.0
_NUM_RANKS = 4


def measure(place: Path, *, output: Path, size: str, algorithms: str) -> Mapping[str, Any]:
    """Runs `hpctrain bench allreduce` of the environment at `place` and returns its results."""
    hpctrain = str(place / "bin/hpctrain")
    environ = {
        **user_environment(),
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(place / "lib"),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    bench = [hpctrain, "bench", "allreduce", "--backend", "mpi", "--sizes", size, "--wires", "fp32"]
    bench += ["--algorithms", algorithms, "--repeats", "20", "--warmup", "3", "--json", str(output)]
    done = run_to_end(
        [hpctrain, "launch", "-n", str(_NUM_RANKS), "--", *bench], environ=environ, timeout_s=_TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"{place.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    result: Mapping[str, Any] = json.loads(output.read_text())
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environments", nargs="+", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--size", default="1MB")
    parser.add_argument("--algorithms", default="auto", help="as of `hpctrain bench allreduce`")
    arguments = parser.parse_args(argv)
    places = [Path(sys.prefix), *(place.absolute() for place in arguments.environments)]
    seconds: dict[tuple[Path, str], list[float]] = {}
    chosen: dict[tuple[Path, str], Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="hpctrain-mpis-") as folder:
        for _ in range(arguments.rounds):
            for place in places:
                result = measure(
                    place,
                    output=Path(folder) / "result.json",
                    size=arguments.size,
                    algorithms=arguments.algorithms,
                )
                for cell in result["cells"]:
                    key = place, cell["algorithm"]
                    seconds.setdefault(key, []).append(cell["seconds"]["median"])
                    chosen.setdefault(key, Counter())[cell["algorithm_run"]] += 1
    print("| environment | algorithm | chosen | median, ms | fastest, slowest | ratio to the first |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (place, algorithm), found in seconds.items():
        first = seconds[places[0], algorithm]
        ratio = median(ours / theirs for ours, theirs in zip(found, first, strict=True))
        name = "make setup" if place == places[0] else place.name
        runs = ", ".join(f"{count} x {which}" for which, count in chosen[place, algorithm].most_common())
        print(
            f"| {name} | {algorithm} | {runs} | {1e3 * median(found):.2f} "
            f"| {1e3 * min(found):.2f}, {1e3 * max(found):.2f} | {ratio:.2f} |"
        )


if __name__ == "__main__":
    main()
