"""`hpctrain check` and `session.check` on real ranks: sound trainings are equal, and seeded faults are named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.check.faulty_data import make_data, write_recipe
from tests.check.faulty_loops import CAUSES
from tests.ranks_launcher import REPOSITORY, rank_environment, run_command

pytestmark = pytest.mark.launches

EXAMPLES = REPOSITORY / "examples"
HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
FIRST = ["sound", "tensor_batches", "learning_rate", "gradients_by_hand", "continued_epoch"]
LOOPS = {loop.__name__: cause for loop, cause in CAUSES.items()}
# name -> task, keys of [data], keys of [optimizer], cause
RECIPES = {
    "Sound": ("Sound", "", "", None),
    "WithDropout": ("WithDropout", "", "", None),
    "MaskedTokens": ("MaskedTokens", "", "", "LOSS_WEIGHTS"),
    "WeighedTokens": ("WeighedTokens", "", "", None),
    "TokensWeighedByMethod": ("TokensWeighedByMethod", "", "", None),
    "WronglyWeighedTokens": ("WronglyWeighedTokens", "", "", "LOSS_WEIGHTS"),
    "average": ("Sound", "", "ema = 0.9", None),
    "SpectralNorm": ("SpectralNorm", "", "", None),
    "sharded": ("Sound", "", '[parallel]\nshard = "parameters"', None),
    "BatchNorm": ("BatchNorm", "", "", "BATCH_STATISTICS"),
    "Contrastive": ("Contrastive", "", "", "BATCH_STATISTICS"),
    "MaxNorm": ("MaxNorm", "", "", "DRIFT"),
    "DropoutInEvaluation": ("DropoutInEvaluation", "", "", "EVALUATION"),
    "TrainingModeInMetrics": ("TrainingModeInMetrics", "", "", "EVALUATION"),
    "OwnGenerator": ("OwnGenerator", "", "", "OWN_RANDOM"),
    "UnseededGenerator": ("UnseededGenerator", "", "", "OWN_RANDOM"),
    "StaleState": ("StaleState", "", "", "OWN_STATE"),
    "StaleBuffer": ("StaleBuffer", "", "", "BUFFER"),
    "RunningBuffer": ("RunningBuffer", "", "", "BUFFER"),
    "SummedLoss": ("SummedLoss", "", "", "ACCUMULATION"),
    "Noise": ("Noise", "", "", "RANDOM"),
    "NotDeterministic": ("NotDeterministic", "", "", "NOT_DETERMINISTIC"),
    "by_rank": ("Sound", 'transform = "tests.check.faulty_tasks:by_rank"', "", "DATA_BY_RANK"),
    "noisy": ("Sound", "", 'target = "tests.check.faulty_tasks:NoisySgd"', "OPTIMIZER"),
    "by_sample": ("Sound", 'transform = "tests.check.faulty_tasks:by_sample"', "", None),
    **{
        name: ("Sound", f'transform = "tests.check.faulty_tasks:{name}"', "", "OWN_RANDOM")
        for name in (
            "numpys_global",
            "pythons_global",
            "torchs_global",
            "without_seed",
            "system_random",
            "by_time",
            "own_seeded",
        )
    },
    "LogOfNegative": ("LogOfNegative", "", "", "NOT_APPLIED"),
    "RootOfZero": ("RootOfZero", "", "", "NOT_APPLIED"),
    "NotFiniteParameter": ("NotFiniteParameter", "", "", "NOT_APPLIED"),
    "WeighsNothing": ("WeighsNothing", "", "", "NOT_APPLIED"),
    "NotFiniteInParts": ("NotFiniteInParts", "", "", "NOT_FINITE"),
    "WithoutGradients": ("WithoutGradients", "", "", None),
    "Float32Constant": ("Float32Constant", "", "", None),
    "LossInFloat32": ("LossInFloat32", "", "", None),
}
FIRST_RECIPES = [
    "Sound",
    "MaskedTokens",
    "WeighedTokens",
    "MaxNorm",
    "by_rank",
    "LogOfNegative",
    "pythons_global",
]


def found_by(module: str, *words: str, where: Path) -> dict[str, dict[str, Any]]:
    """Name -> what the module printed of it, on 2 ranks."""
    argv = [HPCTRAIN, "launch", "-n", "2", "--", sys.executable, "-m", module, *words]
    stdout = run_command(None, argv, cwd=where, timeout_s=1500, expect=0).stdout
    lines = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


def is_right(found: dict[str, Any], cause: str | None) -> bool:
    return bool(found["equal"] if cause is None else found["causes"][:1] == [cause])


def wrong(found: dict[str, dict[str, Any]], expected: dict[str, str | None]) -> list[str]:
    assert set(found) == set(expected)
    return [found[name]["text"] for name, cause in expected.items() if not is_right(found[name], cause)]


def recipes(where: Path, names: list[str]) -> list[str]:
    make_data(where)
    paths = []
    for name in names:
        task, data, optimizer, _ = RECIPES[name]
        paths.append(str(write_recipe(where, task, data=data, optimizer=optimizer, name=name)))
    return paths


def test_faults_of_own_loops_are_named(tmp_path: Path) -> None:
    found = found_by("tests.check.faulty_loops", *FIRST, where=tmp_path)
    assert wrong(found, {name: LOOPS[name] for name in FIRST}) == []
    assert list(tmp_path.iterdir()) == []


def test_faults_of_recipes_are_named(tmp_path: Path) -> None:
    found = found_by("tests.check.faulty_recipes", *recipes(tmp_path, FIRST_RECIPES), where=tmp_path)
    assert wrong(found, {name: RECIPES[name][3] for name in FIRST_RECIPES}) == []
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob(".hpctrain-check-*"))


def check(recipe: Path | str, *options: str, where: Path, expect: int) -> str:
    argv = [HPCTRAIN, "check", str(recipe), "-n", "2", *options]
    return run_command(None, argv, cwd=where, timeout_s=1500, expect=expect).stdout


def test_digits_are_equal_and_the_command_says_so(packed_digits: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(packed_digits)
    printed = check(EXAMPLES / "digits.toml", where=tmp_path, expect=0)
    assert printed.rstrip().endswith("equal within 1e-12")
    assert not (tmp_path / "runs").exists()


def test_a_difference_has_its_own_exit_code_and_json(tmp_path: Path) -> None:
    (recipe,) = recipes(tmp_path, ["SummedLoss"])
    document = json.loads(check(recipe, "--json", where=tmp_path, expect=9))
    assert (document["equal"], document["findings"][0]["cause"]) == (False, "accumulation")


def test_a_recipe_that_cannot_run_ends_as_its_run_would(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "Absent")
    argv = [HPCTRAIN, "check", str(recipe), "-n", "2"]
    result = run_command(None, argv, cwd=tmp_path, timeout_s=600, expect=2)
    assert "task.target" in result.stderr
    assert result.stderr.count("hpctrain: ") == 1
    assert "mpirun" not in result.stderr
    assert not list(tmp_path.glob(".hpctrain-check-*"))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["absent.toml"], 2, "recipe absent.toml cannot be read"),
        (["run.toml", "--set", "run.epoch=3"], 2, "did you mean epochs?"),
        (["run.toml", "--scratch", "absent"], 5, "give --scratch a folder"),
    ],
)
def test_what_is_wrong_before_ranks_start_is_one_message(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    write_recipe(tmp_path, "Sound", name="run")
    result = run_command(
        None, [HPCTRAIN, "check", *words, "-n", "2"], cwd=tmp_path, timeout_s=300, expect=code
    )
    assert said in result.stderr
    assert "checking" not in result.stderr
    assert "mpirun" not in result.stderr


def test_ctrl_c_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    make_data(tmp_path)
    argv = [HPCTRAIN, "check", str(write_recipe(tmp_path, "Sound")), "-n", "2"]
    with subprocess.Popen(
        argv, cwd=tmp_path, env=rank_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("checking")
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=300)
    assert process.returncode == 130, printed
    assert not list(tmp_path.glob(".hpctrain-check-*"))


@pytest.mark.thorough
def test_a_full_disk_is_no_difference(packed_digits: Path, tmp_path: Path) -> None:
    """The folder for checkpoints is a filesystem of 300 kB."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(packed_digits)
    (tmp_path / "small").mkdir()
    command = f"{HPCTRAIN} check {EXAMPLES / 'digits.toml'} -n 2 --scratch small; echo $? > code; ls -A small > left"
    script = f"mount -t tmpfs -o size=300k tmpfs small || exit 77; {command}"
    argv = ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "-m", "sh", "-c", script]
    result = run_command(None, argv, cwd=tmp_path, timeout_s=600)
    if not (tmp_path / "code").exists():
        pytest.skip("a filesystem of its own cannot be mounted here")
    assert (tmp_path / "code").read_text().strip() == "4", result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert "give --scratch" in said[0]
    assert result.stdout == ""
    assert (tmp_path / "left").read_text() == ""


def groups(names: Iterable[str]) -> list[list[str]]:
    """Divides names into groups, each of which takes some minutes on a busy machine."""
    known = list(names)
    return [known[number : number + 15] for number in range(0, len(known), 15)]


@pytest.mark.thorough
@pytest.mark.parametrize("names", groups(LOOPS), ids=lambda names: f"{names[0]}-{names[-1]}")
def test_all_seeded_faults_of_own_loops_are_named(names: list[str], tmp_path: Path) -> None:
    found = found_by("tests.check.faulty_loops", *names, where=tmp_path)
    assert wrong(found, {name: LOOPS[name] for name in names}) == []


@pytest.mark.thorough
@pytest.mark.parametrize("names", groups(RECIPES), ids=lambda names: f"{names[0]}-{names[-1]}")
def test_all_seeded_faults_of_recipes_are_named(names: list[str], tmp_path: Path) -> None:
    found = found_by("tests.check.faulty_recipes", *recipes(tmp_path, names), where=tmp_path)
    assert wrong(found, {name: RECIPES[name][3] for name in names}) == []


@pytest.mark.thorough
def test_a_nan_that_stays_in_a_running_mean_is_named(tmp_path: Path) -> None:
    make_data(tmp_path, nan_every=60)
    paths = [str(write_recipe(tmp_path, task)) for task in ("PoisonedMean", "Sound", "BatchNorm")]
    found = found_by("tests.check.faulty_recipes", *paths, where=tmp_path)
    expected = {"PoisonedMean": "BUFFER_NOT_FINITE", "Sound": None, "BatchNorm": "BATCH_STATISTICS"}
    assert wrong(found, expected) == []
    assert found["BatchNorm"]["causes"] == ["BATCH_STATISTICS"]  # the run puts its buffers back


@pytest.mark.thorough
def test_float32_in_a_float64_recipe_is_named(tmp_path: Path) -> None:
    make_data(tmp_path)
    for task in ("Float32Inside", "LossInFloat32"):
        recipe = write_recipe(tmp_path, task)
        printed = check(recipe, "--set", 'run.precision="fp64"', where=tmp_path, expect=9)
        assert "cause: float32 in a float64 model" in printed


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["characters", "characters_pipeline", "own_task/recipe"])
def test_the_other_examples_are_equal(name: str, tmp_path: Path) -> None:
    run_command(
        None, [sys.executable, str(EXAMPLES / "own_task" / "make_data.py"), "data/spirals"], cwd=tmp_path, expect=0
    )  # fmt: skip
    pack = [HPCTRAIN, "data", "pack", "python-source", "data/python-source", "--window", "128"]
    run_command(None, pack, cwd=tmp_path, expect=0)
    printed = check(EXAMPLES / f"{name}.toml", where=tmp_path, expect=0)
    assert printed.rstrip().endswith("equal within 1e-12")
