"""The files on the page "From your script to four nodes" run as they stand there; the README shows the same lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.test_docs import REPOSITORY, code_blocks

PAGE = REPOSITORY / "docs" / "first-steps.md"
README = REPOSITORY / "README.md"


def difference(page: Path) -> list[str]:
    """The lines of the page's only difference, each with its sign."""
    (text,) = code_blocks(page, "diff")
    return text.splitlines()


def run(*words: str, directory: Path) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PMI_", "SLURM_"))}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory, env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "removed"), [("before", "+"), ("after", "-")])
def test_the_script_runs_before_and_after_the_change(name: str, removed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[1:] for line in difference(PAGE) if not line.startswith(removed)))
    printed = run("-W", "error", str(script), directory=tmp_path).splitlines()
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
    run(*command, "data", "pack", "digits", "data/digits", directory=tmp_path)
    run(*command, "train", "recipe.toml", "--set", "run.epochs=1", directory=tmp_path)
    assert "accuracy" in (tmp_path / "runs" / "mlp" / "summary.json").read_text()
    run(*command, "report", "runs/mlp", directory=tmp_path)
    script = run(*command, "slurm", "submit", "recipe.toml", "--dry-run", directory=tmp_path)
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --ntasks-per-node=2\n" in script
