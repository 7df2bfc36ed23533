"""The examples run as their first lines say, and do what they claim."""

from __future__ import annotations

import difflib
import json
import re
import sys
from pathlib import Path

import pytest

from tests.ranks_launcher import REPOSITORY, run_command, skip_without_horovod

pytestmark = pytest.mark.launches

EXAMPLES = REPOSITORY / "examples"
HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))


def python(*words: str, where: Path, num_ranks: int | None = None) -> str:
    argv = [sys.executable, *words]
    if num_ranks is not None:
        argv = [HPCTRAIN, "launch", "-n", str(num_ranks), "--ranks-per-node", "1", "--", *argv]
    return run_command(None, argv, cwd=where, timeout_s=800, expect=0).stdout


@pytest.fixture(scope="module")
def spirals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("examples")
    python(str(EXAMPLES / "own_task" / "make_data.py"), "data/spirals", where=where)
    return where / "data" / "spirals"


@pytest.fixture
def where(packed_digits: Path, spirals: Path, tmp_path: Path) -> Path:
    """A folder with the data of the examples."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(packed_digits)
    (tmp_path / "data" / "spirals").symlink_to(spirals)
    return tmp_path


def code_lines(path: Path) -> list[str]:
    """The script below its docstring, without blank lines."""
    text = path.read_text().split('"""', 2)[2]
    return [line for line in text.splitlines() if line.strip()]


def test_a_plain_horovod_script_changes_in_at_most_five_lines() -> None:
    before, after = code_lines(EXAMPLES / "own_loop_horovod.py"), code_lines(EXAMPLES / "own_loop.py")
    changed = [
        line
        for line in difflib.unified_diff(before, after, n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert 0 < sum(line[0] == "-" for line in changed) <= 5
    assert 0 < sum(line[0] == "+" for line in changed) <= 5


def test_the_users_own_loop_trains_as_the_horovod_script_does(tmp_path: Path) -> None:
    skip_without_horovod()
    ours = python(str(EXAMPLES / "own_loop.py"), where=tmp_path, num_ranks=2)
    theirs = python(str(EXAMPLES / "own_loop_horovod.py"), where=tmp_path, num_ranks=2)
    losses = [sorted(map(float, re.findall(r"epoch 2 loss ([\d.]+)", text))) for text in (ours, theirs)]
    assert len(losses[0]) == len(losses[1]) == 2
    # fp16 on the wire against fp32: close, over the same samples in the same order
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_a_recipe_names_a_task_of_the_users_own(where: Path) -> None:
    recipe = str(EXAMPLES / "own_task" / "recipe.toml")
    run_command(None, [HPCTRAIN, "launch", "-n", "2", "--", "hpctrain", "train", recipe], cwd=where, expect=0)
    summary = json.loads((where / "runs" / "spirals" / "summary.json").read_text())
    assert summary["quality"]["accuracy"] > 0.95
    assert summary["ranks"] == 2


def test_a_task_that_converts_no_field_trains_in_float64_alike_on_one_rank_and_on_two(where: Path) -> None:
    found = []
    for num_ranks in (1, 2):
        options = [
            "run.precision=fp64",
            "run.epochs=3",
            f"run.directory=runs/{num_ranks}",
            "reduction.wire=fp32",
        ]
        train = ["train", str(EXAMPLES / "own_task" / "recipe.toml")]
        for option in options:
            train += ["--set", option]
        argv = [HPCTRAIN, "launch", "-n", str(num_ranks), "--", "hpctrain", *train]
        run_command(None, argv, cwd=where, expect=0)
        found.append(json.loads((where / "runs" / str(num_ranks) / "summary.json").read_text()))
    assert [summary["ranks"] for summary in found] == [1, 2]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-10)
    assert found[1]["quality"] == found[0]["quality"]


def test_the_users_own_loop_goes_on_to_the_bit(where: Path) -> None:
    script = str(EXAMPLES / "own_loop_resume.py")

    def trained() -> list[str]:
        printed = python(script, "data/digits/train", "saved", where=where, num_ranks=2)
        return [line for line in printed.splitlines() if not line.startswith("note: ")]  # of a busy machine

    whole = trained()
    assert whole[0] == "from step 0"
    for path in (where / "saved").glob("step-*.h5"):
        if "00000092" not in path.name:  # the end of epoch 4
            path.unlink()
    resumed = trained()
    assert resumed[0] == "from step 92"
    assert resumed[1:] == whole[5:]  # epochs 5 and 6, all 17 digits


def test_only_the_loader(where: Path) -> None:
    reported = python(str(EXAMPLES / "only_loader.py"), "data/digits/train", where=where)
    assert reported.count("1438 samples of 1438, each once") == 2


def test_only_the_checkpoint(tmp_path: Path) -> None:
    reported = python(str(EXAMPLES / "only_checkpoint.py"), "saved", where=tmp_path, num_ranks=2)
    assert "epoch 7" in reported
    run_command(None, [HPCTRAIN, "checkpoint", "verify", "saved"], cwd=tmp_path, expect=0)
