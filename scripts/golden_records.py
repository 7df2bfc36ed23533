"""Writes digests of short runs of the examples; two versions of the tree with equal behaviour give the same file.

    python scripts/golden_records.py before.json
    python scripts/golden_records.py after.json --compare before.json
    python scripts/golden_records.py cold.json --compare after.json --launch=--no-fork-server

Trains digits and characters on 1, 2 and 4 ranks, over MPI and Horovod, flat and in two levels, with fp32 and int8 on
the wire, to the end and again from the checkpoint in the middle. The digests of a run cover loss and gradient norm of
every step, the tensors of the last checkpoint, and the bytes of its file. Exits with 1 if a digest differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import xxhash

REPOSITORY = Path(__file__).resolve().parent.parent
HPCTRAIN = Path(sys.executable).with_name("hpctrain")
STEPS, MIDDLE = 12, 6
PACKING = {
    "digits": ["digits", "data/digits"],
    "characters": ["python-source", "data/python-source", "--window", "128"],
}
# Backend, algorithm, wire. int8 uses error feedback.
REDUCTIONS = [
    ("mpi", "hierarchical", "fp32"),
    ("mpi", "hierarchical", "int8"),
    ("mpi", "flat", "fp32"),
    ("horovod", "flat", "fp32"),
    ("horovod", "hierarchical", "int8"),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. ranks_per_node: ranks of each emulated node."""

    recipe: str
    num_ranks: int
    ranks_per_node: int
    backend: str
    algorithm: str
    wire: str

    @property
    def name(self) -> str:
        ranks = f"{self.num_ranks // self.ranks_per_node}x{self.ranks_per_node}"
        return "-".join((self.recipe, ranks, self.backend, self.algorithm, self.wire))


def cases() -> Iterator[Case]:
    for recipe in PACKING:
        yield Case(
            recipe=recipe,
            num_ranks=1,
            ranks_per_node=1,
            backend="auto",
            algorithm="hierarchical",
            wire="fp32",
        )
        for num_ranks, (backend, algorithm, wire) in itertools.product((2, 4), REDUCTIONS):
            yield Case(
                recipe=recipe, num_ranks=num_ranks, ranks_per_node=num_ranks // 2, backend=backend,
                algorithm=algorithm, wire=wire,
            )  # fmt: skip


def train(case: Case, *, where: Path, environ: dict[str, str], launch: list[str]) -> Path:
    """Trains to the end, from the newest checkpoint if there is one. Returns the run's directory.

    launch: more options of `hpctrain launch`.
    """
    directory = where / "runs" / case.name
    settings = {
        "run.directory": f"runs/{case.name}", "run.steps": STEPS, "run.epochs": None, "run.backend": case.backend,
        "reduction.algorithm": case.algorithm, "reduction.wire": case.wire, "checkpoint.every_steps": MIDDLE,
    }  # fmt: skip
    recipe = (where / "examples" / f"{case.recipe}.toml").read_text()
    words = [f"{key}={value}" for key, value in settings.items() if value is not None]
    if case.recipe == "digits":  # which counts epochs
        (where / "digits.toml").write_text(recipe.replace("epochs = 12\n", f"steps = {STEPS}\n"))
        words = [word for word in words if not word.startswith("run.steps=")]
    else:
        (where / f"{case.recipe}.toml").write_text(recipe)
    command = [
        str(HPCTRAIN), "launch", "-n", str(case.num_ranks), "--ranks-per-node", str(case.ranks_per_node), *launch,
        "--", str(HPCTRAIN), "train", f"{case.recipe}.toml", *(part for word in words for part in ("--set", word)),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=where, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise SystemExit(f"{case.name} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return directory


def digest(directory: Path) -> dict[str, str]:
    """Returns digests of the steps after the middle, and of the last checkpoint."""
    steps = {}
    for line in (directory / "metrics" / "rank-00000.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            steps[record["step"]] = [float(record["loss"]).hex(), float(record["grad_norm"]).hex()]
    last = directory / "checkpoints" / f"step-{STEPS:08}.h5"
    tensors = xxhash.xxh3_128()

    def add(name: str, item: object) -> None:
        if name.startswith("tensors/") and isinstance(item, h5py.Dataset):
            tensors.update(name.encode())
            tensors.update(bytes(memoryview(item[()].tobytes())))

    with h5py.File(last) as file:
        file.visititems(add)
    return {
        "steps": xxhash.xxh3_128_hexdigest(json.dumps([steps[step] for step in sorted(steps)]).encode()),
        "steps after the middle": json.dumps([steps[step] for step in sorted(steps) if step > MIDDLE]),
        "tensors": tensors.hexdigest(),
        "file bytes": str(last.stat().st_size),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="JSON file to write the digests to")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="digests of another version, to compare with"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only runs whose name contains this text, such as digits, -2x1-, int8",
    )
    parser.add_argument(
        "--launch",
        action="append",
        default=[],
        metavar="OPTION",
        help="an option of `hpctrain launch`, such as --fork-server",
    )
    arguments = parser.parse_args()
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        (where / "examples").symlink_to(REPOSITORY / "examples")
        for words in PACKING.values():
            subprocess.run(
                [HPCTRAIN, "data", "pack", *words],
                cwd=where,
                env=environ,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        for case in filter(lambda case: arguments.only in case.name, cases()):
            directory = train(case, where=where, environ=environ, launch=arguments.launch)
            whole = digest(directory)
            (directory / "checkpoints" / f"step-{STEPS:08}.h5").unlink()
            resumed = digest(train(case, where=where, environ=environ, launch=arguments.launch))
            found[case.name] = whole
            if any(resumed[key] != whole[key] for key in ("steps after the middle", "tensors")):
                found[case.name] = {**whole, "resumed": json.dumps(resumed)}
            print(
                case.name,
                "resumed: the same" if "resumed" not in found[case.name] else "RESUMED: DIFFERS",
                flush=True,
            )
            shutil.rmtree(directory)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.compare is None:
        return 0
    before = json.loads(arguments.compare.read_text())
    before = {name: digests for name, digests in before.items() if arguments.only in name}
    different = [name for name in {**before, **found} if before.get(name) != found.get(name)]
    for name in different:
        print(f"differs: {name}")
    print(f"{len(found) - len(different)} of {len(found)} runs are the same to the bit")
    return 1 if different or any("resumed" in each for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
