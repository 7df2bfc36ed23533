"""Workers of the loader that are killed in a run under mpirun."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.errors import ExitCode
from tests.ranks_launcher import run_command
from tests.states import is_alive

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))

RECIPE = """
[run]
name = "faults"
directory = "run"
epochs = 1
[task]
target = "hpctrain.tasks.digits:Digits"
options = { width = 4 }
[data]
train = "train"
global_batch = 16
transform = "tests.unit.data.transforms.worker_transforms:mortal"
workers = 2
[optimizer]
lr = 1e-3
"""


def test_a_killed_worker_is_replaced_and_a_deadly_batch_ends_all_ranks_with_code_3(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 16, (400, 1, 8, 8)).astype(np.uint8)
    pack_arrays(
        tmp_path / "train", {"image": images, "label": np.arange(400) % 10}, attributes={"num_classes": 10}
    )
    (tmp_path / "recipe.toml").write_text(RECIPE)
    marks = tmp_path / "marks"
    marks.mkdir()
    result = run_command(
        2,
        [HPCTRAIN, "train", "recipe.toml"],
        cwd=tmp_path,
        env={"HPCTRAIN_TEST_MARK": str(marks)},
        timeout_s=300,
    )
    ended_at = time.time()
    assert result.returncode == ExitCode.DATA, result.stderr
    # One rank alone has sample 100. The worker that died over the first batch did no harm.
    assert "4 workers died one after another over one batch" in result.stderr
    assert (marks / "first").exists()
    deaths = [float(line) for line in (marks / "over-sample-100").read_text().split()]
    assert len(deaths) == 4
    assert ended_at - deaths[0] < 100
    workers = [int(path.name.partition("-")[2]) for path in marks.glob("worker-*")]
    assert len(workers) >= 6
    assert not any(map(is_alive, workers))
    assert [name for name in os.listdir("/dev/shm") if "hpctrain-batch" in name] == []
