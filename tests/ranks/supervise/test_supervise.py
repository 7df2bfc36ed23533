"""`hpctrain supervise` with mpirun on this machine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hpctrain.supervise import AttemptEnd
from tests.ranks_launcher import run_command, start_command
from tests.states import wait_for
from tests.supervised_runs import attempts, causes, write_recipe

pytestmark = pytest.mark.launches

HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
SUPERVISE = [HPCTRAIN, "supervise"]


@pytest.fixture
def where(tmp_path: Path, packed_digits: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(packed_digits)
    return tmp_path


def supervise(
    where: Path, *, plan: str = "", steps: int = 25, step_s: float = 0.02, options: tuple[str, ...] = ()
) -> list[str]:
    write_recipe(where, plan=plan, steps=steps, step_s=step_s)
    return [*SUPERVISE, "-n", "2", *options, "--", "hpctrain", "train", "recipe.toml"]


def test_the_run_goes_on_from_its_newest_checkpoint_until_the_same_user_error_comes_a_second_time(
    where: Path,
) -> None:
    # The messages of the two user errors differ in numbers only.
    argv = supervise(where, plan="kill,memory,disk,raise,all raise", steps=1000)
    result = run_command(None, argv, cwd=where, timeout_s=300, expect=76)
    expected = ["lost rank", "out of memory", "disk full", "user error", "user error"]
    assert causes(where) == expected, result.stderr
    found = attempts(where)
    assert [attempt.number for attempt in found] == [1, 2, 3, 4, 5]
    assert [attempt.first_step for attempt in found] == [0, 5, 10, 15, 20]
    assert [attempt.steps_gained for attempt in found] == [5, 5, 5, 5, 5]
    assert all(attempt.steps_lost in (0, 1, 2, 3) for attempt in found)
    assert found[0].exit_code == 137
    assert "ZeroDivisionError: a bug of the user's" in found[3].reason
    assert "--resume auto" in result.stderr
    assert "effective training time of this job" in result.stderr
    assert "s after the loss" in result.stderr
    assert all(attempt.ended is not None and attempt.ended > attempt.began for attempt in found)
    assert "Do not queue the job again" in result.stderr


def test_ctrl_c_ends_all_ranks_with_their_state_saved_and_starts_nothing_again(where: Path) -> None:
    with start_command(None, supervise(where, steps=20000), cwd=where) as launched:
        wait_for(lambda: (where / "run" / "checkpoints" / "step-00000005.h5").exists(), launched=launched)
        launched.process.send_signal(signal.SIGINT)
        result = launched.wait(timeout_s=300)
        assert result.returncode == 75, result.stderr
        assert set(launched.processes()) <= {launched.process.pid}
    (attempt,) = attempts(where)
    assert attempt.cause is AttemptEnd.CANCELLED
    assert attempt.steps_lost == 0
    assert "the state is saved" in attempt.reason


def test_a_supervisor_that_was_killed_leaves_no_ranks_and_the_next_one_completes_its_record(
    where: Path,
) -> None:
    with start_command(None, supervise(where, steps=20000), cwd=where) as launched:
        wait_for(lambda: (where / "run" / "checkpoints" / "step-00000005.h5").exists(), launched=launched)
        launched.process.send_signal(signal.SIGKILL)
        launched.process.wait()
    run_command(None, supervise(where, steps=10), cwd=where, timeout_s=300, expect=0)
    killed, finished = attempts(where)
    assert killed.cause is AttemptEnd.UNKNOWN
    assert killed.ended is not None
    assert killed.checkpoint_step is not None
    assert killed.checkpoint_step >= 5
    assert (finished.cause, finished.decision) == (AttemptEnd.FINISHED, "end: finished")


def test_a_start_that_takes_too_long_falls_back_to_requeue(where: Path) -> None:
    argv = supervise(where, options=("--start-within-s", "1"))
    result = run_command(None, argv, cwd=where, timeout_s=300, expect=75)
    (attempt,) = attempts(where)
    assert attempt.cause is AttemptEnd.HANG
    assert attempt.decision.startswith("requeue")
    assert "training had not begun 1 s after the launch" in result.stderr


def test_the_sites_own_check_keeps_a_node_out(where: Path) -> None:
    check = where / "check.sh"
    check.write_text("#!/bin/sh\necho the fan is broken\nexit 3\n")
    check.chmod(0o755)
    argv = supervise(where, options=("--check", str(check)))
    result = run_command(None, argv, cwd=where, timeout_s=300, expect=75)
    assert "check.sh ended with 3: the fan is broken" in result.stderr
    assert attempts(where) == ()


def test_a_missing_mount_keeps_a_node_out(where: Path) -> None:
    argv = supervise(where, options=("--check-path", str(where / "nowhere")))
    result = run_command(None, argv, cwd=where, timeout_s=300, expect=75)
    assert f"{where / 'nowhere'} is not there" in result.stderr
    assert os.listdir(where / "run") == []
