"""No rank waits for ever: the late one is named, its stack is shown, and the run ends with exit code 6."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from hpctrain.comm.watchdog.board.node_files import read_ending, read_node
from tests.ranks.comm import comm_cases
from tests.ranks_launcher import run_ranks, start_command
from tests.states import wait_for

pytestmark = pytest.mark.launches


# Over Horovod: test_mismatch.py.
def test_a_rank_that_does_not_come_is_named_with_its_stack(tmp_path: Path) -> None:
    limit_s = 4.0
    result = run_ranks(3, comm_cases.one_rank_sleeps, str(tmp_path), 1, limit_s, expect=6)
    began = min(path.stat().st_mtime for path in tmp_path.glob("began-*"))
    ending = read_ending(tmp_path)
    assert ending is not None
    assert ending.leave_at - began < limit_s + 30  # a busy machine comes to it later
    assert "(limit 4 s, including 1 s to end the run)" in result.stderr
    assert re.search(r"has waited [0-9]", result.stderr)
    assert "in step 41 for all_reduce number 3 of split 1 (ranks 0-2) (10 x float32)" in result.stderr
    assert "did not come: rank 1\n" in result.stderr
    assert "has finished all_gather_bytes number 2" in result.stderr
    assert "other ranks wait for rank 1" in result.stderr
    assert "in one_rank_sleeps" in result.stderr
    assert result.wall_s < 200  # the late rank would sleep for 600 s


def test_a_stopped_process_is_named_by_the_others_and_the_next_one_leads_its_node(tmp_path: Path) -> None:
    """SIGSTOP: the rank cannot run a line of Python, nor answer anybody. The first two ranks read its node's file."""
    argv = [sys.executable, "-m", "tests.ranks_launcher"]
    argv += ["tests.ranks.comm.comm_cases:one_rank_leaves_a_trace_and_stops", "mpi", f'["{tmp_path}"]']
    argv += [str(tmp_path), "90", "4"]
    with start_command(4, argv) as launched:
        wait_for((tmp_path / "pid").exists, launched=launched)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
        result = launched.wait(timeout_s=300)
    assert result.returncode == 6
    assert "did not come: rank 2\n" in result.stderr
    assert "wait for it: ranks 0-1, 3\n" in result.stderr
    status = read_node(tmp_path / "positions", node=1)
    assert status is not None
    assert 3 in status.positions


def test_slow_ranks_within_the_limit_are_not_disturbed(tmp_path: Path) -> None:
    result = run_ranks(3, comm_cases.slow_but_in_time, str(tmp_path))
    (found,) = {tuple(names) for names in result.outputs}
    assert found[:-1] == ("node-0.json",)  # and nothing of the single ranks
    assert Path(found[-1]).name.startswith("hpctrain-watch-")
    assert not Path(found[-1]).exists()
    assert "waited" not in result.stderr
