"""Checkpoints of FSDP2 by torch.distributed.checkpoint, to our format and back, on other numbers of ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import load
from hpctrain.comm import SerialWorld
from tests.ranks_launcher import run_command

pytestmark = pytest.mark.launches

PROGRAM = [sys.executable, "-m", "tests.ranks.distributed.dcp_program"]
COMMAND = [sys.executable, "-m", "hpctrain.cli.main", "checkpoint", "import-dcp"]


def test_fsdp_comes_from_dcp_and_goes_back_on_other_ranks(tmp_path: Path) -> None:
    done = run_command(2, [*PROGRAM, "save", str(tmp_path)], expect=0, timeout_s=300)
    assert done.stdout.count("agrees") == 2
    done = run_command(3, [*PROGRAM, "load", str(tmp_path)], expect=0, timeout_s=300)
    assert done.stdout.count("agrees") == 3
    done = run_command(
        2, [*COMMAND, str(tmp_path / "back"), str(tmp_path / "again")], expect=0, timeout_s=300
    )
    assert "step-00000005.h5" in done.stdout

    expected = torch.load(tmp_path / "reference.pt", weights_only=True)
    first, second = (
        load(tmp_path / name / "step-00000005.h5", comm=SerialWorld()) for name in ("ours", "again")
    )
    assert first[0].document == second[0].document
    for tensors in (first[1], second[1]):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
