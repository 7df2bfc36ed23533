"""Runs a planned launch: prints the command, forwards signals, and ends ranks that outlive the launcher.

A run is stopped by SIGUSR1: mpirun (Open MPI, Hydra) and srun forward it to every rank, whereas SIGTERM and
SIGINT would make them kill the ranks within seconds. So the first Ctrl-C or SIGTERM becomes SIGUSR1, the
ranks save at a step they agree on, and the run ends with exit code 75.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpctrain.errors import ExitCode, LaunchError
from hpctrain.launch.command import LaunchPlan
from hpctrain.launch.failure import RankFailure, find_failure, signal_name

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
_KILL_AFTER_S = 10.0  # from the second Ctrl-C to SIGKILL
_STRAY_GRACE_S = 3.0  # for ranks that outlive a launcher that died
_MAX_LINE_BYTES = 4096
_PR_SET_PDEATHSIG = 1

# Set for the ranks if their output is shown on a terminal. They cannot find out themselves: mpirun gives them a
# pseudo-terminal even if its output goes to a file.
TERMINAL_VARIABLE = "HPCTRAIN_TERMINAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """exit_code: 128 + n if signal n ended the launcher. stop_asked: True if a signal asked the launch to stop."""

    exit_code: int
    stop_asked: bool


def run_plan(plan: LaunchPlan, *, environ: Mapping[str, str], messages: IO[str] | None = None) -> int:
    """Runs the launch with this process's stdout and stderr and returns its exit code. See `run_launch`."""
    return run_launch(plan, environ=environ, messages=messages).exit_code


def run_launch(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    messages: IO[str] | None = None,
    output: IO[bytes] | None = None,
) -> LaunchOutcome:
    """Runs the launch and waits for its end.

    `messages`: stream for the command line and for notes on its end; stderr by default. `output`: file for the ranks'
    output instead of this process's stdout and stderr. Replaces this process's handlers of SIGINT, SIGTERM, SIGHUP,
    SIGUSR1 and SIGUSR2 while it runs, so it must be called from the main thread. The launcher runs in a separate
    session, so that Ctrl-C in the terminal reaches only this process.
    Raises LaunchError if the launcher cannot be started.
    """
    out = messages if messages is not None else sys.stderr
    for note in plan.notes:
        _say(out, note)
    _say(out, plan.shell_line())
    child_environ = {name: value for name, value in environ.items() if name not in plan.env_removed}
    child_environ.update(plan.env_updates)
    if output is None and sys.stdout.isatty():
        child_environ[TERMINAL_VARIABLE] = "1"
    with _signals() as wakeup:
        try:
            child = subprocess.Popen(
                plan.argv,
                env=child_environ,
                stdout=output,
                stderr=subprocess.PIPE,
                start_new_session=True,
                # No other thread runs Python, and libc is loaded already: running code after the fork is safe.
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise LaunchError(f"{plan.argv[0]} cannot be started: {error.strerror}") from error
        watch = _Watch(child, wakeup, out, copy_to=2 if output is None else output.fileno())
        exit_code = watch.until_exit()
    failure = watch.failure
    if failure is not None and failure.signal is not None:
        _say(out, f"rank {failure.rank} on {failure.node} was ended by {signal_name(failure.signal)}")
    if failure is not None and exit_code == 128 + signal.SIGTERM:
        # srun returns the highest code of all ranks, including those that it ended because another one failed.
        exit_code = failure.exit_code
    if exit_code < 0:
        _say(out, f"{Path(plan.argv[0]).name} itself was ended by {signal_name(-exit_code)}")
        exit_code = 128 - exit_code
    if exit_code == ExitCode.STOPPED_EARLY:
        _say(out, "stopped early with the state saved: the same command resumes from there")
    return LaunchOutcome(exit_code=exit_code, stop_asked=watch.stop_asked)


def resolve_command(program: str) -> str:
    """Returns the path of a program for the ranks, or its name if it is on the PATH.

    `hpctrain` is the one in the folder of this Python, even if its environment is not activated. Raises LaunchError
    if there is no such program.
    """
    installed = Path(sys.executable).parent / program
    if program == "hpctrain" and os.access(installed, os.X_OK):
        return str(installed)
    if shutil.which(program) is not None:
        return program
    if "/" not in program and os.access(installed, os.X_OK):
        return str(installed)
    advice = f"did you mean `python {program}`?" if program.endswith(".py") else "check the name and the PATH"
    raise LaunchError(f"the command to launch, {program!r}, is not an executable program: {advice}")


class _Watch:
    """Watches the running launcher: copies its stderr, forwards signals, and ends ranks that outlive it."""

    def __init__(
        self, child: subprocess.Popen[bytes], wakeup: socket.socket, out: IO[str], *, copy_to: int
    ) -> None:
        self.failure: RankFailure | None = None
        self.stop_asked = False
        self._copy_to = copy_to
        self._child = child
        self._wakeup = wakeup
        self._out = out
        self._kill_at_s: float | None = None
        self._line = b""

    def until_exit(self) -> int:
        """Waits for the launcher and for processes that it left. Returns its exit code, -n for signal n."""
        assert self._child.stderr is not None
        os.set_blocking(self._child.stderr.fileno(), False)
        with selectors.DefaultSelector() as ready:
            ready.register(self._wakeup, selectors.EVENT_READ)
            ready.register(self._child.stderr, selectors.EVENT_READ)
            while self._child.poll() is None:
                for key, _ in ready.select(timeout=0.5):
                    if key.fileobj is self._wakeup:
                        self._pass_signals(self._wakeup.recv(64))
                    elif not self._copy_stderr():
                        ready.unregister(self._child.stderr)
                if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
                    self._say_and_kill()
        self._copy_stderr()
        self._end_strays()
        self._copy_stderr()
        self._child.stderr.close()
        return int(self._child.returncode)

    def _copy_stderr(self) -> bool:
        """Copies the available output. Returns False once the launcher has closed its end of the pipe."""
        assert self._child.stderr is not None
        while True:
            try:
                data = os.read(self._child.stderr.fileno(), 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            with contextlib.suppress(OSError):  # a closed output of this process must not end the ranks
                _write_all(self._copy_to, data)
            *lines, self._line = (self._line + data).split(b"\n")
            self._line = self._line[-_MAX_LINE_BYTES:]
            for line in lines:
                # The first failure is the cause; the others follow from it.
                self.failure = self.failure or find_failure(line)

    def _pass_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._child.send_signal(number)
            elif number == signal.SIGINT and self.stop_asked:
                if self._kill_at_s is None:
                    self._kill_at_s = time.monotonic() + _KILL_AFTER_S
                    _say(
                        self._out, f"ending the ranks now (SIGTERM); SIGKILL follows in {_KILL_AFTER_S:.0f} s"
                    )
                    self._child.send_signal(signal.SIGTERM)
                else:
                    self._say_and_kill()
            elif number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) and not self.stop_asked:
                self.stop_asked = True
                _say(
                    self._out,
                    f"{signal.Signals(number).name}: asking the ranks to save and stop (SIGUSR1); "
                    "Ctrl-C ends them without saving",
                )
                self._child.send_signal(signal.SIGUSR1)

    def _say_and_kill(self) -> None:
        self._kill_at_s = None
        _say(self._out, "killing the launcher and its ranks (SIGKILL)")
        for pid in _session_members(self._child.pid):
            _kill(pid, signal.SIGKILL)
        self._child.kill()

    def _end_strays(self) -> None:
        """Ends ranks on this machine that outlived the launcher because it died or could not end them.

        After a launcher that exited normally, processes that are just exiting have _STRAY_GRACE_S seconds to do so.
        """
        start_s = time.monotonic()
        wait_limit_s = 0.0 if self._child.returncode < 0 else _STRAY_GRACE_S
        asked: set[int] = set()
        while strays := _session_members(self._child.pid):
            waited_s = time.monotonic() - start_s
            if waited_s > wait_limit_s + 2 * _STRAY_GRACE_S:
                break
            for pid in strays if waited_s >= wait_limit_s else ():
                late = waited_s > wait_limit_s + _STRAY_GRACE_S
                if late or pid not in asked:
                    _kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                    asked.add(pid)
            time.sleep(0.05)
        if asked:
            processes = f"{len(asked)} process{'es' if len(asked) > 1 else ''}"
            _say(self._out, f"ended {processes} that the launcher left behind")


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yields a socket on which each signal of `_HANDLED` arrives as a byte; restores the handlers afterwards."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in _HANDLED}
    try:
        yield reader
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        reader.close()
        writer.close()


_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """Makes the kernel send SIGTERM to this child when its parent dies, even by SIGKILL; it then ends the ranks."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _session_members(session: int) -> list[int]:
    """PIDs of running processes of the session on this machine. By session, since ranks have own process groups."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) == session and not _is_zombie(int(name)):
                    found.append(int(name))
    return found


def _is_zombie(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state in ("Z", "X")


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _say(out: IO[str], text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"hpctrain launch: {text}", file=out, flush=True)
