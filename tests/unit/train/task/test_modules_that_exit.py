"""A module of the user's that calls sys.exit while it is imported ends no rank, whichever of them imports it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.data import pack_source
from hpctrain.data.transforms.transform import find_transform
from hpctrain.errors import RecipeError, UsageError
from hpctrain.train.task.task import import_named


@pytest.mark.parametrize("code", ["0", "", "3", "'a text'"])
def test_it_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (tmp_path / "module_that_exits.py").write_text(f"import sys\nsys.exit({code})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "module_that_exits:thing"
    importers: dict[type[Exception], list[Callable[[], Any]]] = {
        RecipeError: [lambda: import_named(name, key="task.target"), lambda: find_transform(name)],
        UsageError: [lambda: pack_source(name, out=tmp_path / "out")],
    }
    for kind, functions in importers.items():
        for function in functions:
            with pytest.raises(kind, match=r"module_that_exits.*SystemExit"):
                function()
