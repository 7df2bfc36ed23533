"""A rank of a training with a parameter server fails: the run ends with its name, and nothing saved is lost."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ExitCode
from tests.faults.ssp_program import SAVE_EVERY, STEPS
from tests.ranks_launcher import CommandResult, run_command
from tests.run_files import saved_steps

pytestmark = [pytest.mark.launches, pytest.mark.cold]


def run(folder: Path, num_ranks: int, **options: Any) -> CommandResult:
    document = {"folder": str(folder), "staleness": 2, "servers": "all", **options}
    command = [sys.executable, "-m", "tests.faults.ssp_program", json.dumps(document)]
    return run_command(num_ranks, command, timeout_s=300)


@pytest.mark.parametrize(
    ("how", "rank", "servers", "num_ranks", "code", "texts"),
    [
        # A rank that serves and trains, one that only serves, and ones that only train.
        ("kill", 1, "all", 3, None, [r"rank 1 .*signal 9"]),
        ("kill", 0, [0], 3, None, [r"rank 0 .*signal 9"]),
        (
            "hang",
            1,
            "all",
            3,
            ExitCode.COMMUNICATION,
            [r"for update \d+ of the parameters", "did not come: rank 1\n"],
        ),
        (
            "stop",
            0,
            [0],
            3,
            ExitCode.COMMUNICATION,
            ["(parameters that rank 0 serves|for rank 0 to take)", "did not come: rank 0\n"],
        ),
        pytest.param(
            "stop",
            1,
            [0],
            3,
            ExitCode.COMMUNICATION,
            [r"for update \d+ of the parameters", "did not come: rank 1\n"],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "raise",
            2,
            [0],
            3,
            1,
            [r"(?s)rank 2 on .*ZeroDivisionError: a bug of the user's"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_run_ends_with_the_name_of_the_rank_and_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, how: str, rank: int, servers: Any, num_ranks: int, code: int | None, texts: list[str]
) -> None:
    broken = run(tmp_path, num_ranks, servers=servers, how=how, rank=rank, at=25)
    assert broken.returncode != 0
    if code is not None:
        assert broken.returncode == code, broken.stderr
    for text in texts:
        assert re.search(text, broken.stderr), broken.stderr
    assert all(step % SAVE_EVERY == 0 for step in saved_steps(tmp_path))
    again = run(tmp_path, num_ranks, servers=servers)
    assert again.returncode == 0, again.stderr
    used = [int(line) for path in tmp_path.glob("used-*") for line in path.read_text().splitlines()]
    # No sample of a step that was saved is used again or left out: 60 steps of 12 of 1000 samples.
    assert len(used) == len(set(used)) == STEPS * 12
    assert (tmp_path / "finished").exists()
