"""Runs a planned launch: prints the command, forwards signals, and ends ranks that outlive the launcher.

A run is stopped by SIGUSR1, or by SIGUSR2 if the user asks for that. mpirun and srun forward these signals to every
rank (Hydra needs the help of `hydra_ranks`). SIGTERM and SIGINT, however, make mpirun and srun kill the ranks within
seconds. So the first Ctrl-C or SIGTERM is converted to SIGUSR1, the ranks save at a step on which they agree, and the
run ends with exit code 75.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from hpctrain.errors import ExitCode, LaunchError
from hpctrain.launch.command import Launcher, LaunchPlan
from hpctrain.launch.failure import (
    LOST_PEER_CODE,
    STOPPED,
    FirstFailure,
    RankFailure,
    find_failure,
    signal_name,
)
from hpctrain.launch.hydra_ranks import HydraRanks

# Seconds that mpirun needs until it handles signals, and has started ranks that get them.
_STARTS_WITHIN_S = 1.0
_KILL_AFTER_S = 3.0  # from the second Ctrl-C to SIGKILL; mpirun and srun need 2 s to end their ranks
# Each of these asks the run to stop: a batch script forwards SIGUSR1, and the others are converted to it.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SAME_REQUEST_S = 2.5  # a signal this much later is a second request; not less than in `hpctrain.resilience`
_STRAY_GRACE_S = 3.0  # for ranks that outlive a launcher that died
_MAX_LINE_BYTES = 4096
_STOPPED = re.compile(STOPPED.pattern.encode())
_PR_SET_PDEATHSIG = 1

# Set for the ranks if their output is shown on a terminal. They cannot find out themselves: mpirun gives them a
# pseudo-terminal even if its output goes to a file.
TERMINAL_VARIABLE = "HPCTRAIN_TERMINAL"
# Set for the ranks: name of the signal that asks them to stop. A rank that exits during the start ends all ranks.
STOP_VARIABLE = "HPCTRAIN_STOP_SIGNAL"
_HANDLED = (*STOP_SIGNALS, signal.SIGUSR2, signal.SIGCHLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOutcome:
    """How a launch ended.

    exit_code: exit code of the launch; 128 + n if signal n ended the launcher, 130 after a second Ctrl-C.
    stop_asked: True if a signal asked the launch to stop.
    signals: names of the signals of `STOP_SIGNALS` that this process received, in order.
    failure: the failure that caused all other failures, see `FirstFailure`; None if no failure was reported.
    """

    exit_code: int
    stop_asked: bool
    signals: tuple[str, ...] = ()
    failure: RankFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequest:
    """A request to end the ranks now, without saving.

    The launcher gets SIGTERM and then kills the ranks; processes that remain get SIGKILL after `kill_after_s` seconds.
    """

    reason: str
    kill_after_s: float


class Observer(Protocol):
    """Follows a launch.

    The methods are called by the thread that runs the launch and forwards signals and output. They must therefore
    return within a second or two.
    """

    def launched(self, pid: int) -> None:
        """Called once, with the process id of mpirun or srun."""

    def saw_line(self, line: bytes, failure: RankFailure | None) -> None:
        """Called with each line that the launcher and the ranks print to stderr (under Hydra also to stdout).

        line: the line, without its end.
        failure: the failure that this line reports, alone or together with the previous line; under Hydra, the failure
        of the rank that ended first. None if the line reports no failure.
        """

    def must_end(self) -> EndRequest | None:
        """Called at least twice per second, until it returns a request to end the ranks."""


def run_plan(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    messages: IO[str] | None = None,
    stop_signal: signal.Signals = signal.SIGUSR1,
) -> int:
    """Runs the launch with this process's stdout and stderr, and returns its exit code. See `run_launch`."""
    return run_launch(plan, environ=environ, messages=messages, stop_signal=stop_signal).exit_code


def run_launch(
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    messages: IO[str] | None = None,
    output: IO[bytes] | None = None,
    stop_signal: signal.Signals = signal.SIGUSR1,
    observer: Observer | None = None,
) -> LaunchOutcome:
    """Runs the launch and waits for its end.

    While this function runs, it replaces this process's handlers of SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2. It
    must therefore be called from the main thread. The launcher runs in a session of its own, so that Ctrl-C reaches
    only this process.

    environ: environment variables for the launcher, before the plan's changes.
    messages: stream for the command line and messages about the end; None means stderr.
    output: file for the ranks' output; None means this process's stdout and stderr.
    stop_signal: signal that is sent to the launcher to stop the run.
    observer: object that follows the launch.

    Raises LaunchError if the launcher cannot be started.
    """
    out = messages if messages is not None else sys.stderr
    for note in plan.notes:
        _say(out, note)
    _say(out, plan.shell_line())
    child_environ = {name: value for name, value in environ.items() if name not in plan.env_removed}
    child_environ.update(plan.env_updates)
    child_environ[STOP_VARIABLE] = stop_signal.name
    if output is None and sys.stdout.isatty():
        child_environ[TERMINAL_VARIABLE] = "1"
    with _signals() as wakeup:
        try:
            child = subprocess.Popen(
                plan.argv,
                env=child_environ,
                # Hydra prints on stdout, not on stderr, how a rank has ended.
                stdout=subprocess.PIPE if plan.is_hydra else output,
                stderr=subprocess.PIPE,
                start_new_session=True,
                # No other thread runs Python, and libc is loaded already: running code after the fork is safe.
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise LaunchError(f"{plan.argv[0]} cannot be started: {error.strerror}") from error
        if observer is not None:
            observer.launched(child.pid)
        copies = [_Copy(child.stderr, to=2 if output is None else output.fileno())]
        if child.stdout is not None:
            copies.append(_Copy(child.stdout, to=1 if output is None else output.fileno()))
        hydra = HydraRanks(child.pid, num_ranks=plan.num_ranks) if plan.is_hydra else None
        watch = _Watch(
            child, wakeup, out, copies=copies, stop_signal=stop_signal, observer=observer, hydra=hydra
        )
        exit_code = _exit_code(watch.until_exit(), watch, plan, hydra=hydra, stop_signal=stop_signal, out=out)
        if hydra is not None:
            hydra.close()
    return LaunchOutcome(
        exit_code=exit_code,
        stop_asked=watch.stop_asked,
        signals=tuple(watch.signals),
        failure=watch.failure,
    )


def _exit_code(
    exit_code: int,
    watch: _Watch,
    plan: LaunchPlan,
    *,
    hydra: HydraRanks | None,
    stop_signal: signal.Signals,
    out: IO[str],
) -> int:
    """Prints how the launch ended, and returns the exit code of the launch.

    exit_code: exit code of the launcher; -n if signal n ended it.
    """
    failure = watch.failure
    ignores_stop = watch.stop_asked and failure is not None and failure.signal == stop_signal
    if ignores_stop:
        _say(
            out,
            f"the program does not handle {stop_signal.name}, which asks it to save and stop, and ended unsaved: "
            "docs/guides/own-loop.md has the lines (StopRequest)",
        )
    elif failure is not None and failure.signal is not None:
        # srun names ranks that ended alike together, with those that it has killed afterwards.
        who = f"rank {failure.rank}" if failure.rank.isdigit() else f"at least one of ranks {failure.rank}"
        _say(out, f"{who} on {failure.node} was ended by {signal_name(failure.signal)}")
    decides = exit_code in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    if plan.launcher is Launcher.SRUN and exit_code > 0:
        decides = decides or watch.is_cause or exit_code == LOST_PEER_CODE
    if failure is not None and decides:
        # srun returns the highest code of all ranks, including those that stopped (75) and those that it ended because
        # another one failed (137); and 1 if one was killed for want of memory.
        exit_code = failure.exit_code
    if hydra is not None:
        exit_code = _exit_code_of_hydra(exit_code, watch, hydra, out=out)
    if ignores_stop:
        exit_code = 128 + signal.Signals[watch.signals[0]]
    if watch.interrupted and exit_code not in (ExitCode.DONE, ExitCode.STOPPED_EARLY):
        exit_code = 128 + signal.SIGINT
    if exit_code < 0:
        if not watch.has_killed:
            _say(out, f"{Path(plan.argv[0]).name} itself was ended by {signal_name(-exit_code)}")
        exit_code = 128 - exit_code
    if exit_code == ExitCode.STOPPED_EARLY:
        _say(out, "stopped early: the same command resumes from the state that is saved")
    return exit_code


def _exit_code_of_hydra(exit_code: int, watch: _Watch, hydra: HydraRanks, *, out: IO[str]) -> int:
    failure = watch.failure
    if failure is not None:
        if failure.signal is None and failure.exit_code > 128:
            who = f"rank {failure.rank} on {failure.node}"
            _say(out, f"{who} was the first to be ended by a signal; MPICH does not say by which")
        if failure.signal == signal.SIGKILL and (left := hydra.left_before()):
            _say(
                out,
                f"before that rank {left[0]} had left with exit code 0: if it did so without MPI_Finalize "
                "(os._exit), mpirun has killed the other ranks because of that",
            )
        # MPICH ends with n after signal n, and with the bitwise or of how several ranks ended.
        exit_code = failure.exit_code
    if exit_code == ExitCode.DONE:
        # MPICH 4 sometimes ends with 0 although all ranks left with 75.
        exit_code = ExitCode.STOPPED_EARLY if watch.has_stopped else hydra.first_code() or ExitCode.DONE
    return exit_code


def resolve_command(program: str) -> str:
    """Returns the path of a program for the ranks, or the program's name if it is on the PATH.

    For `hpctrain`, the result is the path of that program in the folder of this Python, even if the Python environment
    is not activated. Raises LaunchError if there is no such program.
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


class _Copy:
    """Copies one of the launcher's output streams to the file descriptor `to`, and keeps its last lines."""

    def __init__(self, stream: IO[bytes] | None, *, to: int) -> None:
        assert stream is not None
        self.stream = stream
        self._to = to
        self._line = b""
        self.before = b""  # the last whole line
        self.ended = False
        os.set_blocking(stream.fileno(), False)

    def lines(self) -> Iterator[bytes]:
        """Copies the available output and yields its whole lines; sets `ended` when the stream has ended."""
        while True:
            try:
                data = os.read(self.stream.fileno(), 65536)
            except BlockingIOError:
                return
            if not data:
                self.ended = True
                return
            with contextlib.suppress(OSError):  # a closed output of this process must not end the ranks
                _write_all(self._to, data)
            *lines, self._line = (self._line + data).split(b"\n")
            self._line = self._line[-_MAX_LINE_BYTES:]
            for line in lines:
                yield line
                self.before = line


class _Watch:
    """Watches the running launcher: copies its output, forwards signals, and ends ranks that outlive it."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        wakeup: socket.socket,
        out: IO[str],
        *,
        copies: Sequence[_Copy],
        stop_signal: signal.Signals,
        observer: Observer | None = None,
        hydra: HydraRanks | None = None,
    ) -> None:
        self._first = FirstFailure()
        self.has_stopped = False  # by a line of the ranks
        self.stop_asked = False
        self.has_killed = False
        self.interrupted = False  # by a second Ctrl-C
        self.signals: list[str] = []
        self._observer = observer
        self._hydra = hydra
        self._ending = False
        self._copies = copies
        self._stop_signal = stop_signal
        self._child = child
        self._wakeup = wakeup
        self._out = out
        self._started_s = time.monotonic()
        self._stop_at_s: float | None = None
        self._asked_s: float | None = None  # when the ranks were asked to stop
        self._kill_at_s: float | None = None

    @property
    def failure(self) -> RankFailure | None:
        """The failure that caused the other failures, see `FirstFailure`; None if there was none."""
        return self._first.failure

    @property
    def is_cause(self) -> bool:
        """True if the rank of `failure` has certainly failed by itself."""
        return self._first.is_cause

    def until_exit(self) -> int:
        """Waits for the launcher, and for processes that the launcher has left behind.

        Returns the launcher's exit code; -n if signal n ended it.
        """
        with selectors.DefaultSelector() as ready:
            ready.register(self._wakeup, selectors.EVENT_READ)
            for copy in self._copies:
                ready.register(copy.stream, selectors.EVENT_READ, copy)
            while self._child.poll() is None:
                is_soon = (
                    self._stop_at_s is not None
                    or self._kill_at_s is not None
                    or self.failure is not None
                    or (self._hydra is not None and self._hydra.is_looking())
                )
                for key, _ in ready.select(timeout=0.05 if is_soon else 0.5):
                    if key.fileobj is self._wakeup:
                        self._pass_signals(self._wakeup.recv(64))
                    else:
                        self._follow(key.data)
                        if key.data.ended:
                            ready.unregister(key.fileobj)
                if self._stop_at_s is not None and time.monotonic() >= self._stop_at_s:
                    self._stop_at_s, self._asked_s = None, time.monotonic()
                    self._hand_on(self._stop_signal)
                if self._hydra is not None:
                    self._hydra.look()
                if self._observer is not None and not self._ending:
                    self._end_if_asked(self._observer.must_end())
                if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
                    self._say_and_kill()
        self._follow_all()
        self._end_strays()
        self._follow_all()
        for copy in self._copies:
            copy.stream.close()
        return int(self._child.returncode)

    def _follow_all(self) -> None:
        for copy in self._copies:
            self._follow(copy)

    def _follow(self, copy: _Copy) -> None:
        for line in copy.lines():
            self.has_stopped = self.has_stopped or _STOPPED.search(line) is not None
            # Open MPI 5 breaks its line in two.
            failure = find_failure(line) or find_failure(copy.before + b" " + line)
            if failure is None and self._hydra is not None:
                failure = self._hydra.find_failure(line)
            if not self._ending:
                self._first.saw(line, failure)
            if self._observer is not None:
                self._observer.saw_line(line, failure)

    def _pass_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in STOP_SIGNALS:
                self.signals.append(signal.Signals(number).name)
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._hand_on(number)
            elif number == signal.SIGINT and self.stop_asked:
                self.interrupted = True
                if self._kill_at_s is None:
                    self._end_now("a second Ctrl-C", kill_after_s=_KILL_AFTER_S)
                else:
                    self._say_and_kill()
            elif number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) and not self.stop_asked:
                self.stop_asked = True
                _say(
                    self._out,
                    f"{signal.Signals(number).name}: asking the ranks to save and stop ({self._stop_signal.name}); "
                    "Ctrl-C ends them without saving",
                )
                self._stop_at_s = self._started_s + _STARTS_WITHIN_S
            elif (
                number in (signal.SIGTERM, signal.SIGHUP)
                and self._asked_s is not None
                and time.monotonic() - self._asked_s >= _SAME_REQUEST_S
            ):  # for the ranks a second request, which ends one that hangs; batch systems send the first twice
                _say(self._out, f"{signal.Signals(number).name} again: the ranks end now, without saving")
                self._hand_on(self._stop_signal)

    def _hand_on(self, number: int) -> None:
        """Sends a signal to all ranks.

        Under Hydra, SIGUSR2 is sent only to the ranks of this machine, and the ranks of other machines follow them.
        """
        if self._hydra is None or number != signal.SIGUSR2:
            self._child.send_signal(number)
        elif not self._hydra.send(number):
            _say(
                self._out,
                "SIGUSR2 is not passed on, because it would end this mpirun, and no rank runs on this machine; to "
                "get a checkpoint now, create the file save-now in the run's directory",
            )

    def _end_if_asked(self, request: EndRequest | None) -> None:
        if request is not None:
            self._end_now(request.reason, kill_after_s=request.kill_after_s)

    def _end_now(self, reason: str, *, kill_after_s: float) -> None:
        """Ends the ranks without saving: SIGTERM makes mpirun and srun kill them."""
        self._ending = True
        self._stop_at_s, self._kill_at_s = None, time.monotonic() + kill_after_s
        _say(self._out, f"{reason}: ending the ranks now (SIGTERM); SIGKILL follows in {kill_after_s:g} s")
        self._child.send_signal(signal.SIGTERM)

    def _say_and_kill(self) -> None:
        self._kill_at_s = None
        self.has_killed = True
        _say(self._out, "killing the launcher and its ranks (SIGKILL)")
        members = _session_members(self._child.pid)
        left = _files_of_open_mpi(members)
        for pid in members:
            _kill(pid, signal.SIGKILL)
        self._child.kill()
        self._child.wait()
        for path in left:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _end_strays(self) -> None:
        """Ends ranks on this machine that outlived the launcher because it died or could not end them.

        If the launcher exited normally, processes that are just exiting have _STRAY_GRACE_S seconds to end.
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
    """Yields a socket on which each signal of `_HANDLED` arrives as a byte, and restores the handlers afterwards."""
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
    """Makes the kernel send SIGTERM to this child when its parent dies, even by SIGKILL.

    The child then ends the ranks.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _session_members(session: int) -> list[int]:
    """Returns the running processes of the session on this machine.

    Ranks have process groups of their own, so they are found by their session.
    """
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) == session and not _is_zombie(int(name)):
                    found.append(int(name))
    return found


def _files_of_open_mpi(ranks: Sequence[int]) -> list[Path]:
    """Returns what mpirun would remove at its end: its session folder, and the ranks' segments of shared memory.

    ranks: processes of the launch, of which some have the variables that mpirun gives to ranks.
    """
    found: set[Path] = set()
    for pid in ranks:
        try:
            items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        variables = dict(os.fsdecode(item).partition("=")[::2] for item in items if b"=" in item)
        job, session = variables.get("PMIX_NAMESPACE", ""), Path(variables.get("PMIX_SERVER_TMPDIR", ""))
        if job.isdigit():
            pattern = f"vader_segment.*.{os.geteuid()}.{int(job):x}.*"
            found.update(Path("/dev/shm").glob(pattern))  # the name has the user's number
        if re.fullmatch(r"pid\.\d+", session.name) and session.parent.name.startswith("ompi."):
            found.add(session)
    return sorted(found)


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
