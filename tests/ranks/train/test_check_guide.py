"""The guide of `hpctrain check`: what it shows is what a reader gets who copies it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.check.guide import blocks, write_examples
from tests.ranks.train.test_check import EXAMPLES, HPCTRAIN, check
from tests.ranks_launcher import run_command

pytestmark = [pytest.mark.launches, pytest.mark.thorough]

ON_RANKS = [HPCTRAIN, "launch", "-n", "2", "--", sys.executable]


def put_digits(packed: Path, where: Path) -> None:
    (where / "data").mkdir()
    (where / "data" / "digits").symlink_to(packed)


def test_the_recipe_and_the_loop_print_what_the_guide_shows(packed_digits: Path, tmp_path: Path) -> None:
    put_digits(packed_digits, tmp_path)
    of_recipe, of_loop = (text for text in blocks("") if " steps in float64" in text)
    assert check(EXAMPLES / "digits.toml", where=tmp_path, expect=0) == of_recipe
    (tmp_path / "check_loop.py").write_text(blocks("python")[0])
    argv = [*ON_RANKS, "check_loop.py"]
    assert run_command(None, argv, cwd=tmp_path, timeout_s=600, expect=0).stdout == of_loop


def test_each_example_has_the_cause_and_the_words_of_its_section(packed_digits: Path, tmp_path: Path) -> None:
    put_digits(packed_digits, tmp_path)
    examples = write_examples(tmp_path)
    files = [str(path) for path in (*tmp_path.glob("e*.toml"), *tmp_path.glob("loop_*.py"))]
    assert len(files) == len(examples) > 20
    argv = [*ON_RANKS, "-m", "tests.check.guide_examples", *files]
    stdout = run_command(None, argv, cwd=tmp_path, timeout_s=1500, expect=0).stdout
    found = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    wrong = []
    for result in found:
        example = examples[result["name"].removeprefix("loop_")]
        is_note = not result["causes"] and f"note: {example.heading.lower()}" in result["text"]
        named = is_note or result["causes"][:1] == [example.heading.lower()]
        if not named or example.quote not in result["text"]:
            wrong.append(f"{result['causes']} {example} {result['text']}")
    assert len(found) == len(examples)
    assert wrong == []
