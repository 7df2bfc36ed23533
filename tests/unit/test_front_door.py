"""The public names: what a type checker and completion see is what there is, in `hpctrain` and in each package."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import hpctrain
from tests.ranks_launcher import REPOSITORY

SCRIPT = REPOSITORY / "tests" / "unit" / "typed_user_script.py"
STUBS = sorted((REPOSITORY / "hpctrain").glob("*/__init__.pyi"))
PACKAGES = ["hpctrain", *(f"hpctrain.{stub.parent.name}" for stub in STUBS)]


def names_of_stub(package: str) -> list[str]:
    """The names that the package's `__init__.pyi` exports."""
    path = Path(import_module(package).__file__ or "").with_suffix(".pyi")
    found = []
    for node in ast.parse(path.read_text()).body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name  # else it is not exported, by PEP 484
            found.append(alias.name)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_what_type_checkers_and_completion_see_is_there(package: str) -> None:
    module = import_module(package)
    names = names_of_stub(package)
    assert len(names) == len(set(names)) > 0
    assert sorted(module.__all__) == sorted(names)
    assert set(names) <= set(dir(module))
    for name in names:
        assert getattr(module, name) is not None


def test_importing_the_command_line_loads_neither_torch_nor_h5py() -> None:
    script = "import sys, hpctrain.cli.main; print(sorted({'torch', 'h5py', 'mpi4py'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_users_script_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    text = SCRIPT.read_text()
    assert [name for name in hpctrain.__all__ if name not in text] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("global_batch=4", 'global_batch="4"').replace("step=1,", 'step="1",'))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(SCRIPT), str(wrong)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    # Newer releases of numpy describe types otherwise, and then hpctrain's own files, which are read too, have errors.
    errors = [
        line
        for line in done.stdout.splitlines()
        if ": error: " in line and not line.startswith(f"hpctrain{os.sep}")
    ]
    # By name: a message that mypy has kept from an earlier run has that run's folder in it.
    assert [line.endswith("[arg-type]") and f"{wrong.name}:" in line for line in errors] == [True] * 2, (
        done.stdout + done.stderr
    )
