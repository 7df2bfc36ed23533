"""What one rank does in the tests of background saves under training. Runs inside a launch.

One launch holds worlds of one to four ranks: a launch costs more than what runs in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.comm import World
from hpctrain.comm.backends.mpi_world import MpiWorld
from hpctrain.telemetry import read_records
from hpctrain.topology import Topology
from tests.ranks.train.training_cases import STEPS, Classifier, train

# Slow enough that many steps are done before a checkpoint of some 30 kB is on disk.
CHECKPOINT = {"mode": "async", "every_steps": 20, "limit_mb_per_s": 0.2, "keep": 9, "engine": "direct"}
STOP_AT = 22


class PartOfWorld(MpiWorld):  # type: ignore[misc]
    """Some of the launch's ranks as a world of their own."""

    def transport(self, topology: Topology) -> None:  # type: ignore[override]
        """None: that one is for all ranks of the launch. Reductions without it are flat."""


def everything(world: World, directory: str) -> dict[str, Any]:
    """By number of ranks, what `_interrupted` found in the part of the world that has so many."""
    from mpi4py import MPI

    found = {}
    for sizes in ((4,), (1, 3), (2, 2)):
        part = [place for place, size in enumerate(sizes) for _ in range(size)][world.rank]
        smaller = PartOfWorld(MPI.COMM_WORLD.Split(part, key=world.rank))
        where = Path(directory) / f"{smaller.num_ranks}-{part}"
        found[f"{smaller.num_ranks}"] = _interrupted(smaller, where, data=Path(directory) / "data")
        smaller.close()
        world.barrier()
    return found


def _interrupted(world: World, where: Path, *, data: Path) -> dict[str, Any]:
    """Never stopped, saved at once; and saved in the background, stopped while that goes on, and resumed.

    As a file on one and three ranks, as a folder of two files on two and four.
    """
    options: dict[str, Any] = {
        "data": {"train": str(data), "held_out": None}, "reduction": {"algorithm": "flat"},
    }  # fmt: skip
    whole = train(
        world, where, "whole", task=Classifier(dropout=0.3), checkpoint={"every_steps": 20}, **options
    )
    options["checkpoint"] = {**CHECKPOINT, "files": 1 if world.num_ranks % 2 else 2}
    stop_after = STOP_AT if world.rank == world.num_ranks - 1 else 0
    first = train(world, where, "run", task=Classifier(dropout=0.3), stop_after=stop_after, **options)
    second = train(world, where, "run", task=Classifier(dropout=0.3), resume="auto", **options)
    records = list(read_records(where / "run" / "metrics" / f"rank-{world.rank:05}.jsonl"))
    return {
        "stopped": first["stopped"],
        "same": second["fingerprint"] == whole["fingerprint"] and second["losses"] == whole["losses"],
        "steps": len(whole["losses"]) == STEPS,
        "resumed_from": second["summary"]["resumed_from"],
        "records": [(record["kind"], record.get("step")) for record in records],
        "saved": sorted(path.name for path in (where / "run" / "checkpoints").iterdir()),
    }
