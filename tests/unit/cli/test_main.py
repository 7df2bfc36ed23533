"""The root of the commands: version, help with examples, exit code of a usage error."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hpctrain.version import __version__
from tests.ranks_launcher import run_command

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
GROUPS = ("doctor", "train", "launch", "data", "checkpoint")


@pytest.mark.parametrize(
    "command", [[HPCTRAIN], [sys.executable, "-m", "hpctrain"]], ids=["script", "module"]
)
def test_the_version_is_reported(command: list[str]) -> None:
    assert run_command(None, [*command, "--version"], expect=0).stdout == f"hpctrain {__version__}\n"


def test_help_shows_every_group_with_an_example() -> None:
    reported = run_command(None, [HPCTRAIN, "--help"], expect=0).stdout
    for group in GROUPS:
        assert f"\n    hpctrain {group} " in reported
        assert f"\n  {group} " in reported


@pytest.mark.parametrize("group", GROUPS)
def test_each_command_has_help_with_an_example(group: str) -> None:
    reported = run_command(None, [HPCTRAIN, group, "--help"], expect=0).stdout
    assert f"hpctrain {group}" in reported.split("Options:")[0].split("\n", 1)[1]


@pytest.mark.parametrize(
    "words", [["nosuch"], ["train"], ["train", "r.toml", "--nosuch"], ["launch", "-n", "x"]]
)
def test_a_usage_error_ends_with_2(words: list[str]) -> None:
    assert run_command(None, [HPCTRAIN, *words], expect=2).stderr.startswith("Usage: hpctrain")


def test_help_needs_no_torch() -> None:
    script = (
        "import sys\nsys.argv = ['hpctrain', '--help']\nfrom hpctrain.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    run_command(None, [sys.executable, "-c", script], expect=0)


def test_garbage_is_collected_when_training_begins_but_not_what_was_imported() -> None:
    script = (
        "import gc, sys\nsys.argv = ['hpctrain', 'train', 'examples/digits.toml']\nimport hpctrain.cli.main\n"
        "assert not gc.isenabled()\nimport hpctrain.run\n"
        "hpctrain.run.train = lambda *_, **__: print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "try: hpctrain.cli.main.main()\nexcept SystemExit: pass"
    )
    assert run_command(None, [sys.executable, "-c", script], expect=0).stdout == "True True\n"


def test_a_command_imports_no_other_ones_and_a_misspelt_one_is_corrected() -> None:
    script = (
        "import sys\nsys.argv = ['hpctrain', 'train', '--help']\nfrom hpctrain.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {name for name in sys.modules if name.startswith('hpctrain.cli.checkpoint')}"
    )
    run_command(None, [sys.executable, "-c", script], expect=0)
    misspelt = run_command(None, [HPCTRAIN, "trian"], expect=2).stderr
    assert "'trian'" in misspelt
    if tuple(int(part) for part in version("typer").split(".")[:2]) >= (0, 20):  # older ones suggest nothing
        assert "'train'" in misspelt
