"""Compares trainings with other MPIs with those of one environment: every algorithm with three wire formats.

    python -m tests.mpis.trainings [--steps N] BASELINE ENVIRONMENT...

BASELINE, ENVIRONMENT: folders with bin/hpctrain and the MPI's mpirun; `make mpis` makes some, and takes `.venv` as the
baseline. Digits on 4 ranks, as 2 emulated nodes of 2. Prints a row per training: the largest relative difference of a
step's loss or gradient norm. Exits with 1 if a difference is larger than rounding explains.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from hpctrain.telemetry.records import read_records
from tests.mpis.__main__ import LIMIT_S, Environment

ALGORITHMS = ("flat", "ring", "direct", "hierarchical", "auto")
# The largest relative difference that is still equal. An MPI's own sum (`flat`) may add the ranks in another order,
# and `auto` may choose another algorithm: one rounding of the wire format per step then differs.
TOLERANCES = {"fp32": 1e-5, "fp16": 1e-2, "int8": 5e-2}
# Algorithms whose sums are hpctrain's own, always in the same order. Only a step's loss, a mean of doubles over the
# ranks, is MPI's sum.
OWN_SUMS = ("ring", "direct", "hierarchical")
OWN_TOLERANCE = 1e-14


def train(there: Environment, *, algorithm: str, wire: str, steps: int) -> list[float]:
    """Trains digits from the start. Returns the loss and the gradient norm of each step, one after the other."""
    directory = there.folder / f"run-{there.path.name}-{algorithm}-{wire}"
    settings = (
        f"run.directory={directory}", f"run.steps={steps}", f"reduction.algorithm={algorithm}",
        f"reduction.wire={wire}",
    )  # fmt: skip
    words = [
        there.hpctrain, "launch", "-n", "4", "--ranks-per-node", "2", "--", there.hpctrain, "train", "digits.toml",
        *(word for each in settings for word in ("--set", each)),
    ]  # fmt: skip
    done = subprocess.run(
        words,
        cwd=there.folder,
        env=there.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(
            f"{there.path.name}, {algorithm}, {wire}: code {done.returncode}: {done.stderr[-2000:]}"
        )
    records = read_records(directory / "metrics" / "rank-00000.jsonl")
    return [record[key] for record in records if record["kind"] == "step" for key in ("loss", "grad_norm")]


def largest_difference(found: list[float], expected: list[float]) -> float:
    if len(found) != len(expected) or not expected:
        raise SystemExit(f"{len(found)} numbers, where the baseline has {len(expected)}")
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "environments", nargs="+", type=Path, metavar="ENVIRONMENT", help="the first is the baseline"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="hpctrain-mpis-") as name:
        folder = Path(name).resolve()
        baseline, *others = (Environment(path.absolute(), folder=folder) for path in arguments.environments)
        subprocess.run(
            [baseline.hpctrain, "data", "pack", "digits", "data/digits"],
            cwd=folder, env=baseline.environ, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        recipe = (Path(__file__).resolve().parents[2] / "examples/digits.toml").read_text()
        (folder / "digits.toml").write_text(recipe.replace("epochs = 12\n", ""))
        print(f"baseline: {baseline.mpi()}", flush=True)
        for algorithm, wire in itertools.product(ALGORITHMS, TOLERANCES):
            expected = train(baseline, algorithm=algorithm, wire=wire, steps=arguments.steps)
            for there in others:
                found = train(there, algorithm=algorithm, wire=wire, steps=arguments.steps)
                difference = largest_difference(found, expected)
                allowed = OWN_TOLERANCE if algorithm in OWN_SUMS else TOLERANCES[wire]
                failed = failed or not difference <= allowed
                print(
                    f"| {there.path.name} | {algorithm}, {wire} | {difference:.1e} |"
                    f"{'' if difference <= allowed else ' DIFFERS'}",
                    flush=True,
                )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
