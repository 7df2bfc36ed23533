"""A rank whose Python stands still in an operation ends all the same, with a word; one that was suspended, or that
holds Python's lock elsewhere, does not end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks_launcher import REPOSITORY
from tests.states import wait_for

pytestmark = [pytest.mark.launches, pytest.mark.timing]

_RANK = """
import ctypes, sys, time
from pathlib import Path
from hpctrain.comm.watchdog.board.node_files import WatchFolders
from hpctrain.comm.watchdog.board.rank_status import RankNodes
from hpctrain.comm.watchdog.timeout_report import exit_now
from hpctrain.comm.watchdog.watcher import Watcher
watcher = Watcher(rank=0, timeout_s=float(sys.argv[2]), abort=exit_now, leave=exit_now)
watcher.lock_may_be_held()
track = watcher.track(group="world", members=(0, 1))
shared = Path(sys.argv[1])
placement = RankNodes(node_of_rank=[0, 0], node_names=["here"])
folders = WatchFolders(rank=0, shared=shared, local=shared / "local", placement=placement)
watcher.prepare(folders)
watcher.publish_in(folders)
time.sleep(1)
Path(sys.argv[1], "ready").touch()
with watcher.during(track, "all_reduce"):
    if sys.argv[3] == "hold":
        ctypes.PyDLL(None).sleep(600)  # with Python's lock
    time.sleep(1)
if sys.argv[3] == "hold outside":
    ctypes.PyDLL(None).sleep(8)
    with watcher.during(track, "all_reduce"):
        time.sleep(0.5)
time.sleep(float(sys.argv[4]))
watcher.end()
print("done")
"""


def start(directory: Path, *words: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _RANK, str(directory), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip


def test_a_rank_whose_python_is_held_ends_with_code_6_and_a_word(tmp_path: Path) -> None:
    process = start(tmp_path, "2", "hold", "0")
    wait_for((tmp_path / "ready").exists)
    try:
        _, printed = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 6, printed
    assert "rank 0 on" in printed
    assert "its Python interpreter is blocked inside the communication library" in printed


def test_a_rank_that_holds_the_lock_outside_any_operation_lives_on(tmp_path: Path) -> None:
    process = start(tmp_path, "4", "hold outside", "0")
    stdout, printed = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (0, "done\n"), printed
    assert printed == ""


def test_a_suspended_rank_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "2", "wait", "6")
    wait_for((tmp_path / "ready").exists)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(8)  # longer than _SUSPENDED_AFTER_S and the limit
    os.kill(process.pid, signal.SIGCONT)
    stdout, printed = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (0, "done\n"), printed
    assert printed == ""
