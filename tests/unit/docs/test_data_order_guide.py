"""The guide to orders: its Python runs, and its table is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.order import quality_rows

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "data-order.md"


def test_the_python_of_the_guide_to_orders_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    assert names["first"].epoch == 2


def test_the_table_of_the_guide_is_what_the_orders_do() -> None:
    assert "\n".join(quality_rows()) in GUIDE.read_text()
