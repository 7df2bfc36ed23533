"""Signals: which ask for a stop, what a second one does, and when they are delivered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.data.transforms.worker_process import _FOR_THE_PARENT
from hpctrain.resilience import StopRequest
from hpctrain.resilience.stop import SAME_REQUEST_S
from hpctrain.resilience.stop_signals import SIGNAL_NAMES
from tests.ranks_launcher import rank_environment


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_is_remembered_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = StopRequest().install()
    try:
        assert not stop.requested
        os.kill(os.getpid(), number)
        wait_until_requested(stop)
        assert stop.signal_name == number.name
    finally:
        stop.restore()
    assert signal.getsignal(number) is before


def wait_until_requested(stop: StopRequest) -> None:
    """A signal comes to another thread than the one that sends it."""
    deadline = time.monotonic() + 300
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.001)


def test_only_the_signals_that_are_named_are_handled() -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    stop = StopRequest(["SIGTERM", "SIGXCPU"]).install()
    try:
        assert signal.getsignal(signal.SIGUSR1) is before[0]
        assert signal.getsignal(signal.SIGTERM) is not before[1]
        os.kill(os.getpid(), signal.SIGXCPU)
        wait_until_requested(stop)
        assert stop.signal_name == "SIGXCPU"
    finally:
        stop.restore()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest().install()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)
        assert not stop.requested
    finally:
        stop.restore()
        signal.signal(signal.SIGHUP, before)


def test_workers_of_a_rank_leave_every_stop_signal_to_it() -> None:
    assert {signal.Signals[name] for name in SIGNAL_NAMES} <= set(_FOR_THE_PARENT)


# ---------------------------------------------------------------------- a second signal

# Prints what it got; waits in a call that no signal interrupts and that never returns to the interpreter, as a rank
# that hangs inside MPI does.
_HANGS = """
import ctypes, sys
from hpctrain.resilience import StopRequest
stop = StopRequest().install()
if len(sys.argv) > 1:
    stop.leave_code = int(sys.argv[1])
print("ready", flush=True)
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""


@contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=rank_environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timing
def test_a_second_signal_ends_a_rank_that_hangs_and_one_that_follows_at_once_is_the_same_request() -> None:
    with running(_HANGS) as process:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(SAME_REQUEST_S)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "rank 0 of 1 (none)" in printed
    assert "s after SIGUSR1: ending at once, nothing more is saved (exit code 143)" in printed


# As above, with Python's lock, so that no thread of Python runs.
_HOLDS = _HANGS.replace("ctypes.CDLL(None)", "ctypes.PyDLL(None)")


@pytest.mark.timing
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_rank_whose_python_is_blocked(number: signal.Signals) -> None:
    assert "PyDLL" in _HOLDS
    with running(_HOLDS) as process:
        process.send_signal(number)
        time.sleep(SAME_REQUEST_S + 0.2)
        assert process.poll() is None
        process.send_signal(number)
        _, printed = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert f": a second stop signal ({number:d}), and C code holds Python's lock: ending at once" in printed


@pytest.mark.timing
@pytest.mark.thorough
@pytest.mark.parametrize("guard", ["compiled", "not compiled"])
def test_a_rank_whose_ending_hangs_too_ends_15_s_later(guard: str) -> None:
    hangs = "import time, hpctrain.resilience.second_signal as second\n" + _HANGS.replace(
        "print(", "stop.leave = lambda code: time.sleep(600)\nprint("
    )
    if guard == "not compiled":
        hangs = hangs.replace("stop = StopRequest", "second._library = lambda: None\nstop = StopRequest")
    with running(hangs) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(SAME_REQUEST_S + 0.2)
        process.send_signal(signal.SIGTERM)
        begin_s = time.monotonic()
        _, printed = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - begin_s > 14
    assert printed.count("ending at once") == 1


@pytest.mark.timing
def test_a_second_ctrl_c_ends_at_once_whatever_came_before() -> None:
    with running(_HANGS) as process:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.2)  # signals of one kind that wait are one
        process.communicate(timeout=300)
    assert process.returncode == 130


@pytest.mark.timing
def test_once_the_state_is_saved_a_second_signal_ends_with_the_code_that_says_so() -> None:
    with running(_HANGS, "75") as process:
        process.send_signal(signal.SIGUSR1)
        time.sleep(SAME_REQUEST_S + 0.2)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=300)
    assert process.returncode == 75


_FORKS = """
import os, time
from hpctrain.resilience import StopRequest
stop = StopRequest().install()
here, there = os.pipe()
child = os.fork()
if child == 0:
    os.write(there, b"x")
    time.sleep(600)
    os._exit(0)
os.read(here, 1)
os.kill(child, 15)
_, status = os.waitpid(child, 0)
time.sleep(0.2)
print("ready", flush=True)
print(os.waitstatus_to_exitcode(status), stop.requested, flush=True)
"""


_CHILDREN = """
import multiprocessing, os, signal, subprocess, sys, time
from hpctrain.resilience import StopRequest
program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
def wait(): time.sleep(600)
if __name__ == "__main__":
    os.setpgid(0, 0)
    stop = StopRequest().install()
    forked = multiprocessing.get_context("fork").Process(target=wait, daemon=True)
    forked.start()
    spawned = subprocess.Popen(program, stdin=subprocess.PIPE)  # as multiprocessing's "spawn" starts them
    print("ready", flush=True)
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        os.killpg(0, number)
    while not stop.requested:
        time.sleep(0.01)
    time.sleep(0.3)
    print(forked.is_alive(), spawned.poll(), flush=True)
    forked.terminate()
    forked.join()
    spawned.communicate()
    stop.restore()
    restored = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    print(forked.exitcode, spawned.returncode, sorted(restored), flush=True)
"""


def test_a_stop_signal_to_the_process_group_ends_no_child(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_CHILDREN)
    with running(
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(tmp_path / "program.py")
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
    assert printed == "True None\n-15 0 []\n"


def test_a_forked_child_dies_of_its_own_signal_and_asks_the_parent_for_nothing() -> None:
    with running(_FORKS) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
    assert printed == "-15 False\n"


# ---------------------------------------------------------------------- while a rank starts

_STARTS = """
import os, signal, sys
from hpctrain.resilience import StopRequest, hold_signals, release_signals
hold_signals()
os.kill(os.getpid(), signal.SIGTERM)
if len(sys.argv) == 1:  # as `restart_with_sleep` does
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"])
stop = StopRequest(["SIGTERM"]).install()
release_signals()
print("ready", flush=True)
print(stop.signal_name, flush=True)
"""


def test_a_signal_while_a_rank_starts_is_held_until_it_can_be_handled_also_over_a_restart() -> None:
    with running(_STARTS) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
    assert printed == "SIGTERM\n"


_STARTS_UNDER_LAUNCH = """
import sys, time
from hpctrain.resilience import StopRequest, hold_signals, let_stop_end, release_signals
hold_signals()
let_stop_end("SIGUSR1", says=sys.argv[1] == "says")
if len(sys.argv) > 2:
    stop = StopRequest([sys.argv[2]]).install()
    release_signals()
print("ready", flush=True)
while True:  # a handler of Python does not run within a call that began just after the signal
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (
            ["says"],
            75,
            "hpctrain: stopped while the ranks started (SIGUSR1): nothing was trained; run the same ",
        ),
        (["silent"], 75, ""),
        # Once the recipe is read it asks for nothing that is not in the recipe.
        (["says", "SIGUSR2"], -signal.SIGUSR1, ""),
    ],
)
def test_a_stop_while_a_rank_of_a_launch_starts_ends_it(
    arguments: list[str], code: int, printed: str
) -> None:
    with running(_STARTS_UNDER_LAUNCH, *arguments) as process:
        process.send_signal(signal.SIGUSR1)
        _, found = process.communicate(timeout=300)
    assert process.returncode == code
    assert found.startswith(printed)
    assert bool(found) is bool(printed)


def test_once_signals_are_handled_a_stop_no_longer_ends_the_rank() -> None:
    with running(_STARTS_UNDER_LAUNCH, "says", "SIGUSR1") as process:
        process.send_signal(signal.SIGUSR1)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
