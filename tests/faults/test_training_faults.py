"""What goes wrong in a run: the message, the exit code, and that no rank hangs or loses what was saved."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data import pack_arrays, read_manifest
from hpctrain.errors import ExitCode
from tests.ranks_launcher import CommandResult, Launched, has_horovod, run_command, start_command
from tests.run_files import summary_of
from tests.runbook import find_shown
from tests.states import is_alive, wait_for

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
needs_horovod = pytest.mark.skipif(
    not has_horovod(), reason="Horovod is not installed: hpctrain runs without it"
)

RECIPE = """
[run]
name = "faults"
directory = "run"
steps = 2000
[task]
target = "tests.faults.faulty_tasks:{task}"
options = {{ width = 4 }}
[data]
train = "data/train"
global_batch = 16
[optimizer]
lr = 1e-3
[checkpoint]
every_steps = 10
keep = 3
"""


@pytest.fixture
def where(tmp_path: Path, packed_digits: Path) -> Path:
    shutil.copytree(packed_digits, tmp_path / "data")
    write_recipe(tmp_path, task="Slow")
    return tmp_path


@pytest.fixture(scope="module")
def trained(packed_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 20 steps, with checkpoints of steps 10 and 20."""
    where = tmp_path_factory.mktemp("trained")
    (where / "data").symlink_to(packed_digits)
    write_recipe(where, task="Slow")
    assert train(where, "run.steps=20").returncode == 0
    return where / "run"


def write_recipe(where: Path, *, task: str) -> None:
    (where / "recipe.toml").write_text(RECIPE.format(task=task))


def train(where: Path, *overrides: str, num_ranks: int = 2, options: tuple[str, ...] = ()) -> CommandResult:
    words = [word for override in overrides for word in ("--set", override)]
    argv = [HPCTRAIN, "train", "recipe.toml", *words, *options]
    return run_command(num_ranks, argv, cwd=where, timeout_s=300)


def wait_for_step(where: Path, step: int, launched: Launched) -> None:
    """Until checkpoint `step` is there."""
    wait_for((where / "run" / "checkpoints" / f"step-{step:08}.h5").exists, launched=launched)


# ---------------------------------------------------------------------- lost ranks, F3


@pytest.mark.parametrize("backend", ["mpi", pytest.param("horovod", marks=needs_horovod)])
def test_a_killed_rank_ends_all_and_the_last_checkpoint_resumes(where: Path, backend: str) -> None:
    words = ["launch", "-n", "4", "--ranks-per-node", "2", "--", "hpctrain", "train", "recipe.toml"]
    with start_command(None, [HPCTRAIN, *words, "--set", f"run.backend={backend}"], cwd=where) as launched:
        wait_for_step(where, 20, launched)
        environment = json.loads((where / "run" / "environment.json").read_text())
        pids = [entry["pid"] for entry in environment["ranks"]]
        os.kill(pids[2], signal.SIGKILL)
        killed_at = time.monotonic()
        result = launched.wait(timeout_s=300)
        while any(map(is_alive, pids)):  # nothing is left behind
            assert time.monotonic() - killed_at < 100
            time.sleep(0.05)
    assert result.returncode in (ExitCode.COMMUNICATION, 128 + signal.SIGKILL)
    assert "rank 2" in result.stderr
    run_command(None, [HPCTRAIN, "checkpoint", "verify", "run/checkpoints"], cwd=where, expect=0)
    saved = max(int(path.stem.split("-")[1]) for path in (where / "run" / "checkpoints").glob("step-*.h5"))
    resumed = train(where, f"run.steps={saved + 2}", f"run.backend={backend}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"(step {saved})" in resumed.stdout


# ---------------------------------------------------------------------- asked to stop, F7


# SIGINT also in tests/ranks/launch/test_interrupts.py.
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_asked_to_stop_it_saves_ends_with_75_and_goes_on(where: Path, number: signal.Signals) -> None:
    words = ["launch", "-n", "2", "--", "hpctrain", "train", "recipe.toml"]
    with start_command(None, [HPCTRAIN, *words], cwd=where) as launched:
        wait_for_step(where, 10, launched)
        launched.process.send_signal(number)
        result = launched.wait(timeout_s=300)
    assert result.returncode == ExitCode.STOPPED_EARLY, result.stderr
    summary = summary_of(where / "run")
    assert summary["status"] == "stopped"
    step = summary["step"]
    assert (where / "run" / "checkpoints" / f"step-{step:08}.h5").exists()
    resumed = train(where, f"run.steps={step + 2}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"(step {step})" in resumed.stdout


# ---------------------------------------------------------------------- diverged, F5


@pytest.mark.thorough  # tests/ranks/train/test_guards.py, on one rank only
def test_a_loss_that_stays_nan_ends_the_run_with_code_7(where: Path) -> None:
    write_recipe(where, task="NotANumber")
    result = train(where, "optimizer.max_skipped_in_row=3")
    assert result.returncode == ExitCode.DIVERGED, result.stderr
    assert result.stderr.count("4 steps in a row had gradients that are not finite") == 1


# ---------------------------------------------------------------------- bad input


def assert_refused(result: CommandResult, code: ExitCode, *texts: str) -> None:
    assert result.returncode == code, f"{result.returncode}\n{result.stderr}"
    reported = [line for line in result.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert len(reported) == 1, result.stderr  # once, not once per rank
    for text in texts:
        assert text in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("override", "code", "texts"),
    [
        ("optimizer.lrr=0.1", ExitCode.USAGE, ["optimizer.lrr: there is no such key; did you mean lr?"]),
        ("data.train=nowhere", ExitCode.DATA, ["nowhere", "hpctrain data pack"]),
        ("data.global_batch=1", ExitCode.USAGE, ["data.global_batch = 1 cannot be split over 2 ranks"]),
        (
            "task.target=no.such.module:Task",
            ExitCode.USAGE,
            ["cannot be imported", "no.such.module:Task", "No module"],
        ),
        ("task.options.colour=3", ExitCode.USAGE, ["task.options do not fit", "colour"]),
        ("run.directory=recipe.toml/run", ExitCode.LAUNCH, ["the run directory", "cannot be written"]),
    ],
    ids=lambda value: value.split("=")[0] + "=" + value.split("=")[1][:12] if isinstance(value, str) else "",
)
def test_bad_input_is_refused_in_plain_words(
    where: Path, override: str, code: ExitCode, texts: list[str]
) -> None:
    assert_refused(train(where, override), code, *texts)


def test_another_number_of_ranks_than_the_recipe_asks_for_is_refused(where: Path) -> None:
    result = train(where, "run.ranks=8")
    assert_refused(result, ExitCode.LAUNCH, "the recipe asks for 8 ranks", "started 2", "-n 8")
    as_in_slurm = re.sub(r", .* started", ", Slurm started", result.stderr)
    find_shown(as_in_slurm, "the recipe asks for", page="f9-wrong-topology.md")


def test_a_shard_cut_short_is_refused(where: Path) -> None:
    shard = where / "data" / "train" / "shard-00000.h5"
    os.truncate(shard, shard.stat().st_size - 1000)
    assert_refused(train(where), ExitCode.DATA, "shard-00000.h5", "cut short")


def test_shards_whose_fields_disagree_are_refused(where: Path) -> None:
    shutil.rmtree(where / "data")
    directory = where / "data" / "train"
    fields = {"image": np.zeros((40, 1, 8, 8), np.float32), "label": np.zeros(40, np.int64)}
    pack_arrays(directory, fields, shard_samples=20)
    second = directory / read_manifest(directory).shards[1].file
    with h5py.File(second, "r+") as file:
        del file["image"]
        file["image"] = np.zeros((20, 1, 8, 8), np.float64)
    assert_refused(train(where), ExitCode.DATA, "'image'", second.name, "float64")


def test_a_checkpoint_of_another_model_is_refused_and_stays(where: Path, trained: Path) -> None:
    shutil.copytree(trained, where / "run")
    result = train(where, "task.options.width=8")
    assert_refused(result, ExitCode.CHECKPOINT, "checkpoint of another model", "0.weight", "--resume never")
    assert (where / "run" / "checkpoints" / "step-00000020.h5").exists()


def test_a_checkpoint_of_other_data_is_refused(where: Path, trained: Path) -> None:
    shutil.copytree(trained, where / "run")
    result = train(where, "data.train=data/test")
    assert_refused(
        result, ExitCode.CHECKPOINT, "its position in the data is not valid in this run", "dataset"
    )


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(where: Path, trained: Path) -> None:
    shutil.copytree(trained, where / "run")
    newest = where / "run" / "checkpoints" / "step-00000020.h5"
    with newest.open("r+b") as file:
        file.seek(newest.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    result = train(where, "run.steps=22")
    assert result.returncode == 0, result.stderr
    assert "step-00000020.h5" in result.stderr  # what was passed over
    assert "step-00000010.h5 (step 10)" in result.stdout


def test_started_anew_it_loses_nothing(where: Path) -> None:
    assert train(where, "run.steps=10", num_ranks=1).returncode == 0
    assert train(where, "run.steps=5", num_ranks=1, options=("--resume", "never")).returncode == 0
    assert (where / "run" / "previous-1" / "checkpoints" / "step-00000010.h5").exists()
    assert (where / "run" / "checkpoints" / "step-00000005.h5").exists()
