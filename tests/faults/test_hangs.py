"""A rank that hangs in a step is found long before the run's own limit, and one that is only slow is left alone."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from hpctrain.comm.watchdog.board.node_files import read_ending
from hpctrain.errors import ExitCode
from tests.faults.checkpoint.mounts import Mount, why_not
from tests.ranks_launcher import CommandResult, run_command, start_command
from tests.run_files import records_of, summary_of
from tests.states import wait_for

pytestmark = [pytest.mark.launches, pytest.mark.cold]

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
LEAST_S = 4.0

# The run's own limit is the default, 600 s.
RECIPE = """
[run]
name = "late"
directory = "run"
steps = 80
[task]
target = "tests.faults.faulty_tasks:OneRankIsLate"
options = {{ how = "{how}", seconds = {seconds} }}
[data]
train = "data/train"
global_batch = 16
[checkpoint]
every_steps = 20
directory = "checkpoints"
[limits]
least_s = {least_s}
"""


@pytest.fixture
def where(tmp_path: Path, packed_digits: Path) -> Path:
    (tmp_path / "data").symlink_to(packed_digits)
    return tmp_path


def write_recipe(where: Path, how: str, *, seconds: float = 3600.0, least_s: float = LEAST_S) -> None:
    (where / "recipe.toml").write_text(RECIPE.format(how=how, seconds=seconds, least_s=least_s))


def train(where: Path, *, num_ranks: int) -> CommandResult:
    return run_command(num_ranks, [HPCTRAIN, "train", "recipe.toml"], cwd=where, timeout_s=300)


@pytest.mark.parametrize(
    ("how", "why", "stack"),
    [
        (
            "sleep",
            r"has used no CPU time for \d+ s, and it waits in no operation \(step\)",
            r"rank 1 is at faulty_tasks.py:\d+ be_late < faulty_tasks.py:\d+ loss < hpctrain/",
        ),
        ("stop", "is stopped", r"rank 1: no stack: interpreter blocked \(the process is stopped\)"),
    ],
)
def test_a_hung_rank_is_named_soon_after_the_limit_that_follows_from_the_steps(
    where: Path, how: str, why: str, stack: str
) -> None:
    write_recipe(where, how)
    result = train(where, num_ranks=3)
    assert result.returncode == ExitCode.COMMUNICATION, result.stderr
    # On a busy machine a step may take so long that 10 of them are more than the least limit.
    because = r"= 10 x the slowest of the last \d+, [\d.]+ s"
    because = rf"(?:{because}|, the minimum by limits.least_s; {because[2:]}, is less)"
    limit = re.search(
        rf"in step 60 for .* \(limit of a step (\S+) s ?{because}; rank 1 on \S+ {why}\)", result.stderr
    )
    assert limit is not None, result.stderr
    limit_s = float(limit[1])
    assert limit_s >= LEAST_S
    assert "did not come: rank 1\n" in result.stderr
    assert re.search(rf"^  {stack}", result.stderr, re.MULTILINE), result.stderr
    # Ranks that poll may be at different lines of the loop.
    waiting = r"^  (ranks 0, 2 wait|rank [02] waits) at \S+:\d+ \S+ < "
    assert re.search(waiting, result.stderr, re.MULTILINE), result.stderr
    ending = read_ending(where / "run" / "watch")
    assert ending is not None
    late_s = ending.written - float((where / "late").read_text())
    assert limit_s < late_s < limit_s + 5.0
    limits = json.loads((where / "run" / "limits.json").read_text())["sections"]
    assert limits["step"]["limit_s"] == 600.0
    assert LEAST_S <= limits["step"]["derived_s"] <= 1.01 * limit_s
    assert limits["step"]["measured"] >= 20
    assert limits["load"] == {"limit_s": 600.0, "derived_s": None, "slowest_s": None, "measured": None}


def test_a_rank_that_computes_for_three_times_the_limit_is_left_alone(where: Path) -> None:
    write_recipe(where, "compute", seconds=3 * LEAST_S)
    result = train(where, num_ranks=2)
    assert result.returncode == 0, result.stderr
    assert summary_of(where / "run")["step"] == 80
    assert "other ranks wait for rank 1" in result.stderr  # it was looked at


def test_a_save_on_a_filesystem_that_becomes_slow_is_left_alone(where: Path) -> None:
    """The third save takes several times the limit of a step."""
    if (reason := why_not()) is not None:
        if os.environ.get("HPCTRAIN_CLUSTER") == "required":
            pytest.fail(f"no filesystem can be mounted: {reason}")
        pytest.skip(f"no slow filesystem: {reason}")
    write_recipe(where, "sleep", seconds=0.1, least_s=1.0)
    (where / "storage").mkdir()
    argv = [HPCTRAIN, "train", "recipe.toml"]
    with (
        Mount(where / "storage", where / "checkpoints") as mount,
        start_command(2, argv, cwd=where) as launched,
    ):
        wait_for((where / "storage" / "step-00000040.h5").exists, launched=launched, every_s=0.01)
        mount.fault("slow", at=0, delay_s=0.15)
        result = launched.wait(timeout_s=300)
        num_operations = len(mount.operations())
    assert result.returncode == 0, result.stderr
    saves = records_of(where / "run", "checkpoint")
    assert [save["step"] for save in saves] == [20, 40, 60, 80]
    assert max(save["stall_seconds"] for save in saves) > 1.0, num_operations
