"""What `hpctrain supervise` reads from the command that it supervises, and what it refuses."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from hpctrain.errors import RecipeError, UsageError

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer
    from typer.testing import CliRunner

    from hpctrain.cli.supervise import supervise_command
    from hpctrain.cli.supervised import read_train_command

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer"
)

RECIPE = '[run]\ndirectory = "runs/a"\n[data]\ntrain = "data/train"\nheld_out = "data/test"\n'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("command", [["/env/bin/hpctrain"], ["/env/bin/python3", "-m", "hpctrain"]])
def test_the_run_directory_and_what_the_ranks_read_are_those_of_the_recipe(
    recipe: Path, command: list[str]
) -> None:
    found = read_train_command([*command, "train", str(recipe), "--resume", "never"])
    assert found is not None
    assert found.run_directory == Path("runs/a")
    assert found.checkpoints == Path("runs/a/checkpoints")
    assert found.paths == (recipe, Path("data/train"), Path("data/test"))


def test_overrides_of_the_command_line_count(recipe: Path) -> None:
    words = [
        "hpctrain",
        "train",
        "--set",
        "run.directory=runs/b",
        str(recipe),
        "--set=checkpoint.directory=/fast/b",
    ]
    found = read_train_command(words)
    assert found is not None
    assert found.run_directory == Path("runs/b")
    assert found.checkpoints == Path("/fast/b")


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py"],
        ["python", "-m", "hpctrain"],
        ["hpctrain", "doctor"],
        ["hpctrain"],
        ["hpctrain", "train"],
    ],
)
def test_of_another_command_nothing_is_known(words: list[str]) -> None:
    assert read_train_command(words) is None


def test_a_recipe_that_cannot_be_read_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        read_train_command(["hpctrain", "train", str(tmp_path / "no.toml")])


def test_a_command_of_ones_own_needs_a_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    app = typer.Typer()
    app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        supervise_command
    )
    result = CliRunner().invoke(app, ["-n", "2", "--", "python", "train.py", "-n", "3"])
    assert isinstance(result.exception, UsageError)
    assert "--run-directory" in str(result.exception)
