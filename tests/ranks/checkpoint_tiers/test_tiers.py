"""Two tiers under real mpirun: all ranks are killed, a node's storage is lost, and nothing is lost by it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.ranks.checkpoint_tiers import tiers_cases as cases
from tests.ranks_launcher import run_ranks

pytestmark = pytest.mark.launches


def test_a_step_that_was_not_drained_survives_the_death_of_all_ranks_and_the_loss_of_a_node(
    tmp_path: Path,
) -> None:
    run_ranks(4, cases.save_twice_and_die, str(tmp_path), expect=None)
    assert len(list(tmp_path.glob("died-*"))) == 4
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000010"]
    (lost,) = (tmp_path / "local").glob("*/host%2F1")
    shutil.rmtree(lost)
    result = run_ranks(2, cases.recover_and_load, str(tmp_path))
    assert result.outputs == [{"step": 20, "recovered": 20, "notes": []}] * 2
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
