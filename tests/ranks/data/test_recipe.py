"""A recipe's ways of reading on real ranks: the same training, whichever way the samples come."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from tests.ranks_launcher import run_ranks
from tests.unit.run.training_cases import SAMPLES, Task, run

pytestmark = pytest.mark.launches


def train(world: Any, where: str) -> dict[str, list[Any]]:
    """Loss and this rank's samples of runs that read in other ways."""
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "memory store": {"memory_store": True},
        "collective": {"io": "collective"},
    }
    for number, (name, data) in enumerate(ways.items()):
        task = Task()
        reported = run(
            Path(where),
            task,
            world=world,
            run={"directory": f"{where}/run-{number}", "steps": None, "epochs": 1, "threads_per_rank": 1},
            reduction={"algorithm": "flat"},
            data=data,
        )
        found[name] = [reported["loss"], task.seen]
    return found


def test_memory_store_and_collective_reading_train_as_plain_reading_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    fields = {"image": rng.random((SAMPLES, 64), dtype=np.float32), "label": rng.integers(0, 10, SAMPLES)}
    pack_arrays(tmp_path / "data", {**fields, "id": np.arange(SAMPLES)}, shard_samples=30)
    outputs = run_ranks(2, train, str(tmp_path)).outputs
    for output in outputs:
        assert output["memory store"] == output["collective"] == output["plain"]
    for way in outputs[0]:
        assert sorted(itertools.chain.from_iterable(output[way][1] for output in outputs)) == list(
            range(SAMPLES)
        )
