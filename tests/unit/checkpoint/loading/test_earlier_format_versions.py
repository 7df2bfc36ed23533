"""Checkpoints of earlier versions, kept as files: they load for ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import Restored, load_newest_good
from hpctrain.comm.backends.threads_world import run_threads
from hpctrain.comm.interface.communicator import World

KEPT = sorted(Path(__file__).parents[3].glob("fixtures/checkpoint-*/expected.json"))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("path", KEPT, ids=[path.parent.name for path in KEPT])
def test_a_kept_checkpoint_loads_bit_for_bit(path: Path, num_ranks: int) -> None:
    expected: dict[str, Any] = json.loads(path.read_text())

    def rank_main(world: World) -> Restored | None:
        return load_newest_good(path.parent, comm=world)

    for restored in run_threads(num_ranks, rank_main, timeout_s=300):
        assert restored is not None
        assert restored.rejected == ()
        assert restored.checkpoint.step == expected["step"]
        assert dict(restored.checkpoint.document) == expected["document"]
        assert len(restored.tensors) == len(expected["tensors"]) > 50
        for entry in expected["tensors"]:
            tensor = restored.tensors[entry["name"]]
            assert str(tensor.dtype) == f"torch.{entry['dtype']}", entry["name"]
            assert list(tensor.shape) == entry["shape"], entry["name"]
            assert digest(tensor) == entry["sha256"], entry["name"]


def test_checkpoints_of_both_formats_and_a_folder_are_kept() -> None:
    assert {"checkpoint-v1", "checkpoint-v2", "checkpoint-v2-folder"} <= {path.parent.name for path in KEPT}
