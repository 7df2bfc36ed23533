"""`import hpctrain`: what a type checker and completion see is what there is."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import hpctrain
from tests.ranks_launcher import REPOSITORY

SCRIPT = REPOSITORY / "tests" / "unit" / "typed_user_script.py"


def typed_names() -> dict[str, str]:
    """Name -> package, as written under TYPE_CHECKING."""
    tree = ast.parse(Path(hpctrain.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            assert alias.asname == alias.name  # else it is not exported, by PEP 484
            found[alias.name] = node.module
    return found


def test_type_checkers_see_the_names_that_are_loaded_when_used() -> None:
    assert typed_names() == hpctrain._HOME
    for name in hpctrain.__all__:
        assert getattr(hpctrain, name) is not None


def test_completion_lists_every_name() -> None:
    assert set(hpctrain.__all__) <= set(dir(hpctrain))


def test_each_name_is_exported_by_the_package_that_it_is_from() -> None:
    for name, package in hpctrain._HOME.items():
        if package != "hpctrain.errors":
            assert name in import_module(package).__all__


@pytest.mark.timeout(900)  # mypy reads torch too, at first without a cache
def test_a_users_script_is_typed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(SCRIPT)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = SCRIPT.read_text()
    assert [name for name in hpctrain.__all__ if name not in text] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("global_batch=4", 'global_batch="4"').replace("step=1,", 'step="1",'))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(wrong)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.stdout.count("[arg-type]") == 2, done.stdout + done.stderr
