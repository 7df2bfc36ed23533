"""Tests for a checkpoint engine, which writes the bytes of all ranks to the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import Replicated, State, TensorShard, load, save
from hpctrain.comm import SerialWorld, World, run_threads
from hpctrain.testing.on_ranks import OnRanks

ROWS = 1000


class EngineContract(OnRanks):
    """Tests that a checkpoint engine writes every byte. Set `engine` to the name that `hpctrain.save` takes.

    Override `run_ranks` for an engine that needs processes; by default the ranks are threads.
    """

    engine = "direct"

    def run_ranks(self, num_ranks: int, function: Callable[[World], Any]) -> list[Any]:
        return run_threads(num_ranks, function)

    @pytest.mark.parametrize("files", [1, 2])
    def test_every_byte_is_read_back(self, tmp_path: Path, num_ranks: int, files: int) -> None:
        """Saves whole, sharded and empty tensors, saves the same step with other values, and reads the new values."""
        files = min(files, num_ranks)

        def rank_main(world: World) -> str:
            for seed in (1, 2):
                result = save(
                    _state(world, seed),
                    directory=tmp_path,
                    step=3,
                    comm=world,
                    engine=self.engine,
                    files=files,
                )
            return str(result.path)

        (path, *_) = self.run_ranks(num_ranks, rank_main)
        _, tensors = load(path, comm=SerialWorld())
        for name, expected in _whole(2).items():
            assert torch.equal(tensors[name], expected), name


def _whole(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(700, 301, generator=random),
        "rows": torch.randn(ROWS, 17, generator=random, dtype=torch.float64),
        "steps": torch.tensor(seed),
        "nothing": torch.empty(0, 4),
    }


def _state(world: World, seed: int) -> State:
    whole = _whole(seed)
    first, last = (ROWS * rank // world.num_ranks for rank in (world.rank, world.rank + 1))
    items: list[Any] = [
        Replicated(name=name, tensor=tensor) for name, tensor in whole.items() if name != "rows"
    ]
    rows = whole["rows"]
    items.append(
        TensorShard(
            name="rows", tensor=rows[first:last].clone(), global_shape=tuple(rows.shape), offset=(first, 0)
        )
    )
    return State(items=items, document={"seed": seed})
