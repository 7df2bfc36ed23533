"""A rank whose input does not come ends by itself, on any number of ranks, and says what it waits for."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from hpctrain.errors import ExitCode
from tests.ranks_launcher import REPOSITORY, rank_environment, run_command

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
RECIPE = """
[run]
name = "hangs"
directory = "run"
steps = 8
timeout_s = 12
[task]
target = "hpctrain.tasks.digits:Digits"
options = { width = 4 }
[data]
train = "train"
global_batch = 16
shuffle = false
"""


def start_loop(kind: str, *, timeout_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.hanging_inputs", kind, str(timeout_s)],
        cwd=REPOSITORY, env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_one_rank_with_a_loop_of_its_own_ends_and_names_samples_transform_and_worker() -> None:
    wanted = {
        "samples": r"samples 12 to 15 of epoch 0: OwnSamples has been read for \d+ s in thread hpctrain-data-0 "
        r"\(this rank's 4 samples have the indices 12, 13, 14, 15\)",
        "thread": r"samples 12 to 15 of epoch 0: the transform hang has run for \d+ s in thread hpctrain-data-0",
        "worker": r"samples 12 to 15 of epoch 0: the transform tests.faults.hanging_inputs:hang has run for \d+ s in "
        r"worker process \d+ ",
        "importing": r"samples 0 to 3 of epoch 0: .* in worker process \d+, which is still importing its module",
        "again": r"the end of an earlier epoch's threads; samples from 12 of epoch 0 on: the transform hang has run",
    }
    loops = {kind: start_loop(kind, timeout_s=6.0) for kind in wanted}
    for kind, loop in loops.items():
        out, err = loop.communicate(timeout=300)
        assert loop.returncode == ExitCode.COMMUNICATION, (kind, err)
        assert re.search(
            rf"rank 0 on \S+ has waited [\d.]+ s for its input: {wanted[kind]}.*\(limit 6 s, including 1.5 s",
            err,
        ), err
        assert "if it is only slow, raise run.timeout_s or limits.input_s" in err
        assert out.splitlines() == {
            "importing": [], "again": ["again 0"],
        }.get(kind, [f"{kind} {start}" for start in (0, 4, 8)])  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("held", "the transform hold has run in thread hpctrain-data-0"),
        pytest.param(
            "held samples", r"OwnSamples has been read in thread hpctrain-data-\d", marks=pytest.mark.thorough
        ),
    ],
)  # fmt: skip
def test_c_code_that_holds_the_lock_is_ended_and_named(kind: str, text: str) -> None:
    loop = start_loop(kind, timeout_s=6.0)
    _, err = loop.communicate(timeout=300)
    assert loop.returncode == ExitCode.COMMUNICATION, (kind, err)
    assert re.search(
        r"rank 0 on \S+ ends\nits Python interpreter has been blocked for [\d.]+ s by C code that holds "
        rf"the GIL: no stacks\. What this rank was preparing when it blocked: .*samples from 12 of epoch 0 on, {text} "
        r"\(this rank's 4 samples have the indices 12, 13, 14, 15\)",
        err,
    ), err


def test_a_batch_that_nobody_needs_keeps_no_run_from_its_end(data: Path, tmp_path: Path) -> None:
    loop = start_loop("ahead", timeout_s=3000.0)
    (tmp_path / "train").symlink_to(data / "train")
    held_back = 'transform = "tests.faults.hanging_inputs:hang_after_32"\nworkers = 1\n'
    (tmp_path / "recipe.toml").write_text(
        RECIPE.replace("steps = 8", "steps = 2").replace("timeout_s = 12", "timeout_s = 3000") + held_back
    )
    result = run_command(None, [HPCTRAIN, "train", "recipe.toml"], cwd=tmp_path, timeout_s=300, expect=0)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002.h5").exists()
    assert re.search(
        r"rank 0 does not wait for batches that are still being made, and that nobody needs: samples from 32 of epoch "
        r"0 on: the transform tests.faults.hanging_inputs:hang_after_32 has run for \d+ s in worker process \d+ ",
        result.stderr,
    ), result.stderr
    assert "transformed again" not in result.stderr
    out, err = loop.communicate(timeout=300)
    assert (loop.returncode, out) == (0, "ahead 0\nahead has ended\n"), err
    assert "nobody needs: samples from 12 of epoch 0 on: the transform hang has run" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_a_rank_whose_input_hangs(number: signal.Signals) -> None:
    loop = start_loop("thread", timeout_s=3000.0)
    assert loop.stdout is not None
    while loop.stdout.readline() != "thread 8\n":
        assert loop.poll() is None
    loop.send_signal(number)
    time.sleep(2.5)
    assert loop.poll() is None
    loop.send_signal(number)
    _, err = loop.communicate(timeout=300)
    assert loop.returncode == 128 + number
    assert f"after {number.name}: ending at once, nothing more is saved" in err


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    images = draw.integers(0, 16, (256, 1, 8, 8)).astype(np.uint8)
    pack_arrays(
        where / "train", {"image": images, "label": np.arange(256) % 10}, attributes={"num_classes": 10}
    )
    return where


def test_the_rank_whose_transform_hangs_is_named_and_so_are_its_samples(data: Path, tmp_path: Path) -> None:
    (tmp_path / "train").symlink_to(data / "train")
    transform = 'transform = "tests.faults.hanging_inputs:hang_on_rank_1"\nworkers = 1\n'
    (tmp_path / "recipe.toml").write_text(RECIPE + transform)
    result = run_command(2, [HPCTRAIN, "train", "recipe.toml"], cwd=tmp_path, timeout_s=300)
    assert result.returncode == ExitCode.COMMUNICATION, result.stderr
    what = (
        r"for its input: samples 32 to 47 of epoch 0: the transform tests.faults.hanging_inputs:hang_on_rank_1 has "
        r"run for \d+ s in worker process \d+ \(this rank's 8 samples have the indices 40, 41, 42, 43, ...\)"
    )
    assert re.search(rf"rank 1 on \S+ has waited [\d.]+ s in step 2 {what}", result.stderr), result.stderr
    # Rank 0 waits for rank 1, and says what that waits for.
    assert re.search(
        rf"  rank 1 on \S+ \(process \d+\) .* in no operation in step 2 \(waits {what}", result.stderr
    )


def test_an_evaluation_whose_input_hangs_on_all_ranks_ends_them(data: Path, tmp_path: Path) -> None:
    (tmp_path / "train").symlink_to(data / "train")
    held_out = (
        'held_out = "train"\nheld_out_transform = "tests.faults.hanging_inputs:hang_in_evaluation"\n'
        "[telemetry]\nevaluate_every_steps = 4\n"
    )
    (tmp_path / "recipe.toml").write_text(RECIPE + held_out)
    result = run_command(2, [HPCTRAIN, "train", "recipe.toml"], cwd=tmp_path, timeout_s=300)
    assert result.returncode == ExitCode.COMMUNICATION, result.stderr
    assert re.search(
        r"for its input: samples 0 to \d+ of epoch 0: the transform tests.faults.hanging_inputs:hang_in_evaluation "
        r"has run for \d+ s in thread hpctrain-data-0",
        result.stderr,
    )
