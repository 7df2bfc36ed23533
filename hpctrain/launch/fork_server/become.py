"""Turns a forked process into the rank, with all properties that a program started by the client would have.

The client is the process that the launcher has started in place of the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import os
import random
import resource
import select
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch.fork_server.likeness import limits, read_command, read_environ, read_status
from hpctrain.launch.fork_server.plan import FOR_CLIENT
from hpctrain.launch.rank_identity.launcher_process import CLIENT_VARIABLE

_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """The request of a client.

    pid: process id of the client.
    mask: signals that were blocked when the client started, as a bit mask in the format of /proc.
    leash: file descriptor of one end of a pipe. The other end is closed when the client ends.
    descriptors: for each file descriptor of the client, the descriptor of its copy in this process.
    """

    pid: int
    mask: int
    leash: int
    descriptors: Mapping[int, int]


def become(request: ForkRequest, *, title: str, command: Sequence[str], keep: set[int]) -> None:
    """Makes this process, which has just been forked, what the client's program would have been. Raises OSError.

    title: name of the process, as `ps` shows it.
    command: command line to show in /proc/PID/cmdline.
    keep: file descriptors that belong to libraries and must stay open.
    """
    os.setpgid(0, 0)  # a signal to the client's group reaches this process through the client, and once
    _die_with(request.leash)
    client = request.pid
    _take_descriptors(request, keep=keep)
    with contextlib.suppress(OSError):  # as a user in Slurm's control group of another task of the same step
        _join_cgroups(client)
    os.sched_setaffinity(0, os.sched_getaffinity(client))
    for limit in limits():
        resource.setrlimit(limit, resource.prlimit(client, limit))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, client))
    Path("/proc/self/oom_score_adj").write_bytes(Path(f"/proc/{client}/oom_score_adj").read_bytes())
    status = read_status(client)
    os.umask(int(status["Umask"], 8))
    os.chdir(os.readlink(f"/proc/{client}/cwd"))
    environ = read_environ(client)
    for name in FOR_CLIENT:
        environ.pop(name, None)
    if (of_client := environ.get("OMPI_COMMAND")) is not None:
        program, *arguments = read_command(client)
        # Open MPI 4 gives the name of the program, Open MPI 5 the path with which it was started.
        named = program if "/" in of_client else os.path.basename(program)
        environ |= {"OMPI_COMMAND": named, "OMPI_ARGV": " ".join(arguments)}
    environ[CLIENT_VARIABLE] = str(client)
    replace_environ(environ)
    tempfile.tempdir = None  # what an import has found without this rank's TMPDIR
    _show_command(command)
    _libc.prctl(_PR_SET_NAME, os.fsencode(title)[:15], 0, 0, 0)
    _seed()
    _open_streams()
    _take_signals(ignored=int(status["SigIgn"], 16), blocked=request.mask)


def end_without_destructors() -> None:
    """Makes this process, which was just forked, exit without the destructors of libraries that were loaded before.

    The destructors of libtorch take 0.2 s to free memory that the system frees anyway. The C library calls exit
    functions in reverse order of registration: first everything that is registered from now on, then the functions
    below from the last line to the first.
    """
    close_files = None
    if (hdf5 := sys.modules.get("h5py.defs")) is not None:
        close_files = getattr(ctypes.CDLL(hdf5.__file__), "H5close", None)
    if not hasattr(_libc, "on_exit") or (hdf5 is not None and close_files is None):  # only glibc has it
        return
    _libc.on_exit(_libc._exit, None)
    _libc.__cxa_atexit(_libc.fflush, None, None)
    if close_files is not None:
        _libc.__cxa_atexit(close_files, None, None)


def _die_with(leash: int) -> None:
    """Makes the kernel kill this process when the client ends, which closes all other ends of the pipe."""
    fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(leash, 0)
    if ended.poll(0):
        os._exit(1)


def _take_descriptors(request: ForkRequest, *, keep: set[int]) -> None:
    wanted = {request.leash, *request.descriptors, *keep}
    for number, copy in request.descriptors.items():
        os.dup2(copy, number, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _join_cgroups(client: int) -> None:
    for theirs, ours in zip(_cgroups(client), _cgroups(os.getpid()), strict=True):
        if theirs != ours:
            (theirs / "cgroup.procs").write_text(str(os.getpid()))


def _cgroups(pid: int) -> list[Path]:
    found = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found.append(Path("/sys/fs/cgroup", controllers.removeprefix("name=")) / path.lstrip("/"))
    return found


def _seed() -> None:
    """Gives this process its own random numbers. PyTorch starts with a constant seed anyway."""
    random.seed()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        current = processes.current_process()
        current.authkey = os.urandom(32)


def _open_streams() -> None:
    """Opens the standard streams as Python does when it starts."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or any(
        "u" in word for word in sys.orig_argv[1:2] if word.startswith("-")
    )
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            terminal = os.isatty(number)
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
            continue
        before = getattr(sys, f"__{name}__")
        unbuffered = is_unbuffered and mode == "w"
        file = io.FileIO(number, mode, closefd=False)
        file.name = f"<{name}>"
        raw = file if unbuffered else io.BufferedReader(file) if mode == "r" else io.BufferedWriter(file)
        stream = io.TextIOWrapper(
            raw,
            encoding=before.encoding,
            errors=before.errors,
            newline=None if mode == "r" else "\n",
            line_buffering=not is_unbuffered and (terminal or number == 2),
            write_through=unbuffered,
        )
        setattr(stream, "mode", mode)  # noqa: B010  (read-only for mypy)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _take_signals(*, ignored: int, blocked: int) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in (32, 33):  # used by the C library
            continue
        if ignored >> (number - 1) & 1 and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif number not in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(
        signal.SIG_SETMASK, [number for number in signal.valid_signals() if blocked >> (number - 1) & 1]
    )


def _show_command(command: Sequence[str]) -> None:
    """Writes the command line where the kernel shows it to others: /proc/PID/cmdline."""
    # The numbers of proc(5): arg_start 48, arg_end 49.
    _fill(_address(48), _address(49), b"".join(os.fsencode(word) + b"\0" for word in command))


def replace_environ(environ: Mapping[str, str]) -> None:
    """Makes `environ` the variables of this process, also in /proc/PID/environ, where other processes see them."""
    os.environ.clear()
    os.environ.update(environ)  # the C library makes copies, so that what it had before may be overwritten
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    # env_start 50, env_end 51.
    _fill(_address(50), _address(51), variables)


def _address(number: int) -> int:
    """Returns field `number` of /proc/self/stat, see proc(5)."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[number - 3])


def _fill(first: int, end: int, content: bytes) -> None:
    room = end - first
    content = content[: room - 1]
    ctypes.memmove(first, content + bytes(room - len(content)), room)
