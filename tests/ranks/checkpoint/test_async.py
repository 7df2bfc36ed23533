"""Saving in the background under training with real ranks: resumed equals never stopped, to the bit."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from hpctrain.checkpoint.saving.saver import ask_for_save
from hpctrain.data import pack_arrays
from hpctrain.errors import ExitCode
from tests.ranks.checkpoint import async_cases as cases
from tests.ranks_launcher import run_ranks, start_command
from tests.states import wait_for

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))


def pack(where: Path, *, num_samples: int) -> None:
    images, labels = load_digits(return_X_y=True)
    fields = {
        "image": images[:num_samples].reshape(-1, 1, 8, 8).astype(np.float32),
        "label": labels[:num_samples].astype(np.int64),
        "id": np.arange(num_samples),
    }
    pack_arrays(where / "data", fields)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    where = tmp_path_factory.mktemp("async")
    pack(where, num_samples=1438)
    return run_ranks(4, cases.everything, str(where), backend="mpi", timeout_s=300).outputs


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_stopped_while_a_save_goes_on_it_resumes_as_if_never_stopped(
    outputs: list[dict[str, Any]], num_ranks: int
) -> None:
    found = [output[f"{num_ranks}"] for output in outputs if f"{num_ranks}" in output]
    assert len(found) in (num_ranks, 4)
    suffix = ".h5" if num_ranks % 2 else ""  # a file, or a folder of two
    for rank in found:
        assert rank["stopped"]
        assert rank["steps"]
        assert rank["same"]
        assert rank["resumed_from"].endswith(f"step-{cases.STOP_AT:08}{suffix}")
        # All that were begun are there, and nothing else: what was in flight at the stop was committed.
        assert rank["saved"] == [f"step-{step:08}{suffix}" for step in (20, 22, 40, 50)]
        # Training went on while the one of step 20 was written.
        assert rank["records"].index(["step", 21]) < rank["records"].index(["checkpoint", 20])


RECIPE = """
[run]
name = "asked"
directory = "run"
steps = 100000
[task]
target = "tests.faults.faulty_tasks:Slow"
options = { width = 4 }
[data]
train = "data"
global_batch = 16
[checkpoint]
mode = "async"
keep = 9
"""


def test_a_signal_and_a_file_ask_all_ranks_for_one_checkpoint_each(tmp_path: Path) -> None:
    pack(tmp_path, num_samples=200)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    checkpoints = tmp_path / "run" / "checkpoints"

    def steps() -> list[int]:
        return sorted(int(path.stem.split("-")[1]) for path in checkpoints.glob("step-*.h5"))

    words = ["launch", "-n", "2", "--", "hpctrain", "train", "recipe.toml"]
    with start_command(None, [HPCTRAIN, *words], cwd=tmp_path) as launched:
        wait_for(lambda: "step " in launched.stdout, launched=launched)
        assert steps() == []
        launched.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: len(steps()) == 1, launched=launched)
        ask_for_save(tmp_path / "run")
        wait_for(lambda: len(steps()) == 2, launched=launched)
        assert not (tmp_path / "run" / "save-now").exists()
        asked = steps()
        launched.process.send_signal(signal.SIGTERM)
        result = launched.wait(timeout_s=300)
    assert result.returncode == ExitCode.STOPPED_EARLY, result.stderr
    stopped_at = json.loads((tmp_path / "run" / "summary.json").read_text())["step"]
    assert steps() == [*asked, stopped_at]
