"""A rank whose process ends, or waits for ever, inside a call still tells what it knew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hpctrain

# Loaded by its path: the package around it would load torch, for seconds.
SCRIPT = """
import ctypes, os, runpy, signal, sys, time
ExitNotice = runpy.run_path(sys.argv[1])["ExitNotice"]
with ExitNotice("what I knew", timeout_s=float(sys.argv[3])):
    exec(sys.argv[2])
print("came back")
"""
MODULE = Path(hpctrain.__file__).parent / "run" / "doctor" / "exit_notice.py"


def run(statement: str, *, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", SCRIPT, str(MODULE), statement, str(timeout_s)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("statement", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9)]
)
def test_a_process_that_ends_inside_the_block_is_spoken_for(statement: str, code: int) -> None:
    done = run(statement)
    assert done.returncode == code
    assert done.stderr == "what I knew\n"


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("time.sleep(600)", id="waits in Python"),
        pytest.param("ctypes.PyDLL(None).sleep(600)", id="waits in C and holds Python's lock"),
    ],
)
def test_a_process_that_does_not_come_back_in_time_ends_with_5(statement: str) -> None:
    done = run(statement, timeout_s=1.0)
    assert done.returncode == 5
    assert done.stderr == "what I knew\nno answer within 1 s: given up\n"


@pytest.mark.parametrize(("statement", "code"), [("pass", 0), ("raise SystemExit(4)", 4)])
def test_words_are_taken_back_when_the_block_is_left(statement: str, code: int) -> None:
    done = run(statement)
    assert done.returncode == code
    assert "what I knew" not in done.stderr


def test_outside_the_block_signals_are_as_before() -> None:
    done = run("pass\nimport atexit; atexit.register(os.kill, os.getpid(), 5)")
    assert done.returncode == -5
