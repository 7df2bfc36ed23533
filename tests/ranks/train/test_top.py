"""`hpctrain top` in a terminal of 60 columns, while two ranks train."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import pack_arrays
from tests.ranks_launcher import Launched, rank_environment, run_command, start_command
from tests.run_files import records_of
from tests.states import wait_for

pytestmark = pytest.mark.launches

COLUMNS, ROWS = 60, 30
HPCTRAIN = str(Path(sys.executable).with_name("hpctrain"))
RECIPE = """
[run]
name = "watched"
directory = "run"
steps = 600
[task]
target = "tests.straggler_tasks:SlowForAWhile"
options = { sleep_s = 0.04 }
[data]
train = "data"
global_batch = 4
[checkpoint]
every_steps = 20
[telemetry]
write_every_s = 0.3
"""
_NEW_FRAME = re.compile(r"\x1b\[(H|\?1049[hl])")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_STEP = re.compile(r"^step +(\d+) of 600")
WATCHED_S = 300.0


class Terminal:
    """A command in a pseudo-terminal, and all that it has drawn."""

    def __init__(self, command: list[str], *, cwd: Path) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = {**rank_environment(), "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.drawn = ""

    def read(self, *, timeout_s: float) -> None:
        """Waits until it draws, and until it has paused."""
        while select.select([self._ours], [], [], timeout_s)[0]:
            try:
                found = os.read(self._ours, 1 << 16)
            except OSError:  # it has ended
                return
            if not found:
                return
            self.drawn += found.decode()
            timeout_s = 0.05

    def lines(self) -> list[str]:
        """Returns the lines of all frames, without colours."""
        return _CONTROL.sub("", _NEW_FRAME.sub("\n", self.drawn)).replace("\r", "").split("\n")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def watch(terminal: Terminal, launched: Launched) -> set[int]:
    """Reads until three steps were shown while the run trained. Returns them."""
    deadline_s = time.monotonic() + WATCHED_S
    shown: set[int] = set()
    while len(shown) < 3:
        assert time.monotonic() < deadline_s, terminal.drawn
        assert launched.process.poll() is None, launched.stdout + launched.stderr
        terminal.read(timeout_s=1.0)
        found = map(_STEP.match, terminal.lines())
        shown = {int(match[1]) for match in found if match is not None and int(match[1]) > 0}
    return shown


def test_a_run_is_watched_live_and_ctrl_c_ends_the_view_only(tmp_path: Path) -> None:
    pack_arrays(tmp_path / "data", {"x": np.ones((2160, 4), np.float32)})
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with start_command(2, [HPCTRAIN, "train", "recipe.toml"], cwd=tmp_path) as launched:
        wait_for((tmp_path / "run" / "starts.jsonl").exists, launched=launched, timeout_s=WATCHED_S)
        terminal = Terminal([HPCTRAIN, "top", "run", "--every", "0.3"], cwd=tmp_path)
        try:
            shown = watch(terminal, launched)
            os.kill(terminal.process.pid, signal.SIGINT)
            assert terminal.process.wait(300) == 0, terminal.drawn
            terminal.read(timeout_s=1.0)
        finally:
            terminal.close()
        assert launched.process.poll() is None  # it goes on
        done = launched.wait(timeout_s=300)
    assert done.returncode == 0, done.stderr
    (*_, advice) = records_of(tmp_path / "run", "scaling")
    assert "a run on one node does not measure the link between nodes" in advice["text"]
    assert advice["predictions"][0]["ranks"] == 2
    recorded = [record["step"] for record in records_of(tmp_path / "run")]
    assert shown <= set(recorded)
    assert "\x1b[?1049h" in terminal.drawn
    left = terminal.drawn.rpartition("\x1b[?1049l")[2]  # the terminal is as before, with the last frame
    assert "running" in left
    assert "watched" in left
    assert any("rank 1" in line for line in terminal.lines())
    assert max(map(len, terminal.lines())) <= COLUMNS
    once = run_command(None, [HPCTRAIN, "top", "run", "--once"], cwd=tmp_path, expect=0)
    assert "finished" in once.stdout
    assert "600 of 600" in once.stdout
    assert "step 600, " in once.stdout
