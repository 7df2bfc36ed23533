"""The guide to the checkpoint commands: its commands and options exist, and its Python runs."""

from __future__ import annotations

import functools
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    # typer itself uses names that newer releases of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    from typer.testing import CliRunner

    from hpctrain.cli.checkpoint.group import checkpoint_app

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:click", "ignore::DeprecationWarning:typer"
)
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "checkpoint-commands.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_every_command_and_option_of_the_guide_exists() -> None:
    shown: dict[str, set[str]] = {}
    for line in "".join(blocks("")).splitlines():
        words = shlex.split(line, comments=True)
        place = words.index("hpctrain")
        assert words[place + 1] == "checkpoint"
        options = {word for word in words[place:] if word.startswith("--")}
        shown.setdefault(words[place + 2], set()).update(options)
    assert set(shown) == {command.name for command in checkpoint_app.registered_commands}
    for option in re.findall(r"`(--[a-z-]+)", GUIDE.read_text()):
        assert any(option in _help(command) for command in shown), option
    for command, options in shown.items():
        for option in options:
            assert option in _help(command), f"{command} has no {option}"


@functools.cache
def _help(command: str) -> str:
    return CliRunner().invoke(checkpoint_app, [command, "--help"]).stdout


def test_the_python_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(block, str(GUIDE), "exec"), names)
    assert names["copied"].path.is_dir()
