"""Horovod's interface over MPI alone, on 1 to 3 ranks, and a Horovod script of which one line is changed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.ranks_launcher import REPOSITORY, run_command

pytestmark = [pytest.mark.launches, pytest.mark.cold]

OPERATIONS = [sys.executable, "-m", "tests.ranks.hvd.operations_program"]
ERRORS = [sys.executable, "-W", "default", "-m", "tests.ranks.hvd.errors_program"]
TRAINING = [sys.executable, "-m", "tests.ranks.hvd.training_program"]
EXAMPLE = REPOSITORY / "examples" / "own_loop_horovod.py"


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_every_operation_has_its_result(num_ranks: int) -> None:
    done = run_command(num_ranks, OPERATIONS, expect=0, timeout_s=300)
    assert done.stdout.count("has seen everything") == num_ranks


def test_every_operation_has_its_result_on_two_nodes() -> None:
    done = run_command(4, OPERATIONS, env={"HPCTRAIN_RANKS_PER_NODE": "2"}, expect=0, timeout_s=300)
    assert done.stdout.count("has seen everything") == 4


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_programs_continue_after_errors_that_all_ranks_raise(num_ranks: int) -> None:
    done = run_command(num_ranks, ERRORS, expect=0, timeout_s=300)
    assert done.stdout.count("continued") == num_ranks


def test_models_train_as_in_one_process() -> None:
    done = run_command(3, TRAINING, expect=0, timeout_s=300)
    assert done.stdout.count("agrees") == 3


def test_a_rank_that_calls_something_else_is_named() -> None:
    done = run_command(2, [*OPERATIONS, "different-calls"], timeout_s=300, expect=6)
    assert "rank 0 \"allreduce 'loss' float32 (3,) average\"" in done.stderr
    assert "rank 1 \"allgather 'accuracy' float32 (0,)\"" in done.stderr


def test_a_missing_rank_is_named_with_the_operation(tmp_path: Path) -> None:
    done = run_command(2, [*OPERATIONS, "missing", str(tmp_path / "watch")], timeout_s=300, expect=6)
    assert "allreduce 'loss' float32 (3,) average" in done.stderr
    assert re.search(r"rank 1\b", done.stderr)


def test_one_line_of_a_horovod_script_changes(tmp_path: Path) -> None:
    script = EXAMPLE.read_text()
    line = "import horovod.torch as hvd\n"
    assert script.count(line) == 1
    changed = tmp_path / "changed.py"
    changed.write_text(script.replace(line, "import hpctrain.hvd as hvd\n"))
    found = losses(changed)
    assert len(found) == 6
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: nothing to compare with")
    assert found == losses(EXAMPLE)


def losses(script: Path) -> list[str]:
    """The lines of two ranks, sorted."""
    done = run_command(2, [sys.executable, str(script)], expect=0, timeout_s=300)
    return sorted(re.findall(r"epoch \d loss [\d.]+", done.stdout))
