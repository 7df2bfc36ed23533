"""No rank waits for ever: the late one is named, its stack is shown, and the run ends with exit code 6."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hpctrain.comm.watchdog.rank_status import read_ending
from tests.ranks.comm import comm_cases
from tests.ranks_launcher import Launched, run_ranks, start_command

pytestmark = pytest.mark.launches


@pytest.mark.parametrize("backend", ["mpi", "horovod"])
def test_a_rank_that_does_not_come_is_named_with_its_stack(backend: str, tmp_path: Path) -> None:
    limit_s = 4.0
    result = run_ranks(3, comm_cases.one_rank_sleeps, str(tmp_path), 1, limit_s, backend=backend, expect=6)
    began = min(path.stat().st_mtime for path in tmp_path.glob("began-*"))
    ending = read_ending(tmp_path)
    assert ending is not None
    assert ending.leave_at - began < limit_s + 2  # a busy machine comes to it later
    assert "(limit 4 s, including 1 s to end the run)" in result.stderr
    assert "has waited 3" in result.stderr
    assert "in step 41 for all_reduce number 3 of split 1 (ranks 0-2) (10 x float32)" in result.stderr
    assert "did not come: rank 1\n" in result.stderr
    assert "is past all_gather_bytes number 2" in result.stderr
    assert "other ranks wait for rank 1" in result.stderr
    assert "in one_rank_sleeps" in result.stderr
    assert result.wall_s < 30


def wait_for(path: Path, *, launched: Launched, timeout_s: float = 60) -> str:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, launched.stderr
        assert launched.process.poll() is None, launched.stderr
        time.sleep(0.05)
    return path.read_text()


def test_a_stopped_process_is_named_by_the_others(tmp_path: Path) -> None:
    """SIGSTOP: the rank cannot run a line of Python, nor answer anybody."""
    argv = [sys.executable, "-m", "tests.ranks_launcher"]
    argv += ["tests.ranks.comm.comm_cases:one_rank_leaves_a_trace_and_stops", "mpi", f'["{tmp_path}"]']
    argv += [str(tmp_path), "90", "2"]
    with start_command(2, argv) as launched:
        os.kill(int(wait_for(tmp_path / "pid", launched=launched)), signal.SIGSTOP)
        result = launched.wait(timeout_s=90)
    assert result.returncode == 6
    assert "did not come: rank 0\n" in result.stderr


def test_slow_ranks_within_the_limit_are_not_disturbed(tmp_path: Path) -> None:
    result = run_ranks(3, comm_cases.slow_but_in_time, str(tmp_path))
    assert result.outputs == [["rank-0.json", "rank-1.json", "rank-2.json"]] * 3
    assert "waited" not in result.stderr
