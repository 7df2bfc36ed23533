"""The runbooks: their parts are there, and a test on the cluster looks for a line of each in what was printed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.runbook import RUNBOOKS, find_shown, is_shown

CLUSTER_TESTS = Path(__file__).resolve().parents[2] / "cluster"
PAGES = sorted(RUNBOOKS.glob("f*.md"), key=lambda path: int(path.name[1:].partition("-")[0]))


def pages_looked_for() -> set[str]:
    """The pages that calls in the tests on the cluster name in an argument `page`."""
    return {
        str(argument.value.value)
        for path in CLUSTER_TESTS.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for argument in node.keywords
        if argument.arg == "page" and isinstance(argument.value, ast.Constant)
    }


def test_there_is_a_runbook_for_each_failure_and_the_index_links_all() -> None:
    numbers = [int(path.name[1:].partition("-")[0]) for path in PAGES]
    assert numbers == list(range(1, len(PAGES) + 1))
    assert len(PAGES) >= 10
    index = (RUNBOOKS / "README.md").read_text()
    assert {path.name for path in PAGES} <= set(re.findall(r"\]\(([^)#]+)\)", index))


def test_a_test_on_the_cluster_provokes_each_of_the_ten_failures() -> None:
    assert {path.name for path in PAGES[:10]} <= pages_looked_for()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_runbook_has_all_its_parts(path: Path) -> None:
    parts = re.findall(r"^## (.+)", path.read_text(), flags=re.MULTILINE)
    wanted = ["What you see", "What it means", "What to do", "How to see that it is cured"]
    assert [part for part in parts if part in wanted] == wanted


@pytest.mark.parametrize(
    ("line", "page", "shown"),
    [
        ("rank 7 (hpct12) is no longer slow (compute)", "f2-slow-rank.md", True),
        ("rank 7 (hpct12) is no longer slow (paging)", "f2-slow-rank.md", False),
        # On the page broken into two lines, with hashes that differ from run to run.
        (
            'hpctrain: the content of /tmp/local/digits must be the same on every rank: ranks 0-9 "00112233445566aa", '
            'but rank 3 "bb00112233445566"',
            "f10-data.md",
            True,
        ),
        # On the page with `...` for the damage.
        (
            "hpctrain: no checkpoint in runs/digits/checkpoints can be used: runs/digits/checkpoints/step-00000005.h5: "
            "damaged: the file is cut short",
            "f4-damaged-checkpoint.md",
            True,
        ),
        ("", "f4-damaged-checkpoint.md", False),
    ],
)
def test_a_line_is_found_on_a_page_whatever_its_numbers(line: str, page: str, shown: bool) -> None:
    assert is_shown(line, page=page) is shown
    if shown:
        assert find_shown(f"another line\n{line}\n", line[9:30], page=page) == line
    else:
        with pytest.raises(AssertionError, match=re.escape(f"{page} shows none")):
            find_shown(line, line, page=page)
