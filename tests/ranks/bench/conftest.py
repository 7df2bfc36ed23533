"""A working directory with a recipe, as a user has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.bench.workplace import make_workplace


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with data and a task, and a checkpoint that must not be touched."""
    make_workplace(tmp_path)
    return tmp_path
