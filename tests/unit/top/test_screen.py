"""The frames: they fit into every width, with and without colours and Unicode; and the command without a terminal."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from hpctrain.top import RunFollower, RunState, draw, sparkline
from hpctrain.top.screen import bar
from tests.ranks_launcher import run_command

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))


@pytest.fixture
def state(finished: Path) -> RunState:
    return RunFollower(finished).refresh(now=2e9)


def drawn(state: RunState, *, width: int, ascii_only: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(draw(state, width=width, ascii_only=ascii_only))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [20, 40, 80, 132, 400])
def test_no_line_is_wider_than_the_terminal(state: RunState, width: int) -> None:
    crowded = replace(
        state, incidents=[(0.0, "x" * 1000)] * 100, notes=["y" * 500], status="z" * 500, directory="/d" * 300
    )
    for each in (state, crowded, replace(state, losses=[], loss=None, parts={}, step_s=None, slowest=[])):
        lines = drawn(each, width=width)
        assert max(map(cell_len, lines)) <= width
        assert len(lines) < 40


def test_a_frame_says_what_is_known(state: RunState) -> None:
    text = "\n".join(drawn(state, width=160))
    for expected in (
        "finished", "2 ranks on 2 nodes", "60 of 60  100%", "samples/s", "p95", "rank 1 (n1)", "W waiting",
        "step 60, ", "accuracy 0.5 after step 60",
    ):  # fmt: skip
        assert expected in text
    for width in (30, 160):
        assert "".join(drawn(state, width=width, ascii_only=True)).isascii()


def test_a_bar_has_as_many_letters_as_shares(state: RunState) -> None:
    for width in (1, 10, 99):
        assert len(bar(state.parts, width=width)) == width
    letters = bar({"compute": 0.5, "waiting": 0.25, "other": 0.25}, width=8)
    assert letters == "CCCCWWOO"
    assert bar({}, width=8) == ""


def test_a_sparkline_shows_means_and_marks_what_is_not_finite() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=20) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 8, 8], width=2) == "▁█"
    assert sparkline([1.0, math.nan, 2.0, math.inf], width=4, ascii_only=True) == "_!@!"
    assert sparkline([3.0, 3.0], width=4) == "▁▁"
    assert sparkline([], width=4) == ""


def test_without_a_terminal_the_command_prints_one_frame_and_needs_no_torch(
    finished: Path, tmp_path: Path
) -> None:
    words = ["top", str(finished), "--once"]
    script = (
        f"import sys\nsys.argv = ['hpctrain', *{words!r}]\nfrom hpctrain.cli.main import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    done = run_command(None, [sys.executable, "-c", script], expect=0)
    assert done.stdout.count("finished") == 1
    assert "\x1b" not in done.stdout
    refused = run_command(None, [HPCTRAIN, "top", str(tmp_path / "none")], expect=2)
    assert refused.stderr == (
        f"hpctrain: {tmp_path / 'none'} does not exist: give the directory of a run, run.directory of its recipe\n"
    )
