"""The files on the page "From your script to four nodes" run as they stand there; the README shows the same lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.docs.test_docs import REPOSITORY, code_blocks, python

PAGE = REPOSITORY / "docs" / "first-steps.md"
README = REPOSITORY / "README.md"


def difference(page: Path) -> list[str]:
    """The lines of the page's only difference, each with its sign."""
    (text,) = code_blocks(page, "diff")
    return text.splitlines()


@pytest.mark.parametrize(("name", "removed"), [("before", "+"), ("after", "-")])
def test_the_script_runs_before_and_after_the_change(name: str, removed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[1:] for line in difference(PAGE) if not line.startswith(removed)))
    printed = python("-W", "error", str(script), cwd=tmp_path).splitlines()
    losses = [float(line.split(" loss ")[1]) for line in printed if line.startswith("epoch ")]
    assert len(losses) == 3, name
    assert losses[-1] < losses[0]


def test_the_readme_shows_lines_of_this_script() -> None:
    assert set(difference(README)) - {"+"} <= set(difference(PAGE))
    new = [line for line in difference(README) if line.startswith("+") and line != "+"]
    assert len(new) == 7
    assert "seven new lines" in README.read_text()


def test_the_task_and_the_recipe_train_and_make_a_batch_job(tmp_path: Path) -> None:
    (task,), (recipe,) = code_blocks(PAGE, "python"), code_blocks(PAGE, "toml")
    (tmp_path / "mlp.py").write_text(task)
    (tmp_path / "recipe.toml").write_text(recipe)
    command = ("-m", "hpctrain.cli.main")
    python(*command, "data", "pack", "digits", "data/digits", cwd=tmp_path)
    python(*command, "train", "recipe.toml", "--set", "run.epochs=1", cwd=tmp_path)
    assert "accuracy" in (tmp_path / "runs" / "mlp" / "summary.json").read_text()
    python(*command, "report", "runs/mlp", cwd=tmp_path)
    script = python(*command, "slurm", "submit", "recipe.toml", "--dry-run", cwd=tmp_path)
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --ntasks-per-node=2\n" in script
