"""The fork server of a node, which imports what the ranks need, and then forks one process for each client that asks.

The client is `_fork_client.c`, which documents the messages between client and server. The server has one thread, which
waits in `poll`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.launch.fork_server.become import ForkRequest
from hpctrain.launch.fork_server.likeness import Likeness, read_command, read_environ, read_status
from hpctrain.launch.fork_server.plan import LINGER_VARIABLE, OWNER_VARIABLE
from hpctrain.launch.fork_server.preload import Imported, folder_of
from hpctrain.launch.fork_server.program import Program, read_program
from hpctrain.launch.rank_identity.identity import identify
from hpctrain.launch.rank_identity.launcher_process import process_key

LISTENS_AT = 3
# First number of the server's file descriptors: a rank needs the small numbers.
_FROM = 200
_MOST_DESCRIPTORS, _MOST_TEXT = 64, 900  # limits of a message
_KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
_CREDENTIALS = struct.Struct("3i")
# Seconds between two checks whether clients are suspended, and seconds to wait for clients if their number is unknown.
_LOOK_S, _IDLE_S = 1.0, 5.0


@dataclass(slots=True, kw_only=True)
class _Rank:
    client: int
    connection: socket.socket
    pid: int
    pidfd: int
    suspended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """Result of `Server.run` in a process that the server has forked.

    request: request of the client.
    program: program to run.
    folder: folder that must be first in the program's sys.path; None for none.
    """

    request: ForkRequest
    program: Program
    folder: str | None


class Server:
    """Serves clients on the listening socket `listening`.

    program: program whose libraries the server has imported.
    imported: modules that the server has imported.
    own: properties of the server's process when it started.
    refusal: why the server cannot fork; the server tells its clients this reason. None if the server can fork.
    """

    def __init__(
        self,
        listening: int,
        *,
        program: Program | None,
        imported: Imported,
        own: Likeness,
        refusal: str | None,
    ) -> None:
        self._listening = socket.socket(fileno=_move(listening))
        self._path = Path(self._listening.getsockname())
        self._program = program
        self._imported = imported
        self._own = own
        self._refusal = refusal
        self._ranks: list[_Rank] = []
        self._num_served = 0
        self._expected: int | None = None
        self._linger_s = 0.0
        self._owner = ""  # "" if it is on another node, or there is none
        self._idle_since_s = time.monotonic()
        self._looked_s = 0.0
        self._said = self._has_shown = False

    def run(self) -> Forked | None:
        """Serves until no client needs the server.

        Then returns None. In each forked process, returns what that process must become.
        """
        while True:
            waiting = select.poll()
            waiting.register(self._listening, select.POLLIN)
            for rank in self._ranks:
                waiting.register(rank.pidfd, select.POLLIN)
                waiting.register(rank.connection, select.POLLIN)
            ready = {number for number, _ in waiting.poll(self._wait_ms())}
            for rank in [*self._ranks]:
                if rank.pidfd in ready:
                    self._end(rank)
                elif rank.connection.fileno() in ready:
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
            if self._listening.fileno() in ready:
                forked = self._serve(self._listening.accept()[0])
                if forked is not None:
                    return forked
            self._follow_suspended()
            if self._is_done() and self._close():
                return None

    def _wait_ms(self) -> int:
        return int(1000 * (_LOOK_S if self._ranks else 0.1))

    def _is_done(self) -> bool:
        if self._ranks:
            self._idle_since_s = time.monotonic()
            return False
        all_served = self._expected is not None and self._num_served >= self._expected
        lingers_s = self._linger_s
        if self._owner and process_key(int(self._owner.partition("-")[0])) != self._owner:
            lingers_s = 0.0
        limit_s = lingers_s if all_served else max(lingers_s, _IDLE_S)
        return time.monotonic() - self._idle_since_s >= limit_s

    def remove_abandoned(self) -> None:
        """Removes the files that killed servers of this user have left on this node."""
        for path in self._path.parent.glob("*.lock"):
            with contextlib.suppress(OSError), path.open("r+b") as file, socket.socket(*_KIND) as tried:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if tried.connect_ex(str(path.with_suffix(""))) in (errno.ECONNREFUSED, errno.ENOENT):
                    _remove(path.with_suffix(""))

    def _close(self) -> bool:
        """Removes the socket and returns True; returns False if a client has just connected.

        Clients hold the lock while they connect.
        """
        lock = self._path.with_name(self._path.name + ".lock")
        try:
            with lock.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                waiting = select.poll()
                waiting.register(self._listening, select.POLLIN)
                if waiting.poll(0):
                    return False
                _remove(self._path)
        except OSError:
            pass
        return True

    def _serve(self, connection: socket.socket) -> Forked | None:
        connection = socket.socket(fileno=_move(connection.detach()))
        try:
            request, program, folder, refusal = self._receive(connection)
        except (OSError, ValueError):  # the client has ended
            connection.close()
            return None
        self._num_served += 1
        if refusal is None:
            self._show_log(request)
            # Nothing is buffered, and no other thread runs: `preload` has looked.
            try:
                pid = os.fork()
            except OSError as error:  # the ranks that run must not end for that
                refusal = f"no process could be forked ({error.strerror})"
            else:
                if pid == 0:
                    assert program is not None
                    return Forked(request=request, program=program, folder=folder)
                pidfd = _move(os.pidfd_open(pid))
                self._ranks.append(_Rank(client=request.pid, connection=connection, pid=pid, pidfd=pidfd))
                with contextlib.suppress(OSError):
                    socket.send_fds(connection, [f"s{pid}".encode()], [pidfd])
        if refusal is not None:
            text = "" if self._said else refusal
            self._said = True
            with contextlib.suppress(OSError):
                connection.send(b"r" + text.encode()[:_MOST_TEXT])
            connection.close()
        for number in (request.leash, *request.descriptors.values()):
            os.close(number)
        return None

    def _show_log(self, request: ForkRequest) -> None:
        """Writes what libraries printed while they were imported to the stderr of the first rank."""
        if self._has_shown or 2 not in request.descriptors:
            return
        self._has_shown = True
        with contextlib.suppress(OSError):
            printed = self._path.with_name(self._path.name + ".log").read_bytes()
            if printed:
                os.write(request.descriptors[2], printed)

    def _receive(
        self, connection: socket.socket
    ) -> tuple[ForkRequest, Program | None, str | None, str | None]:
        """Receives the request of a client. Raises OSError or ValueError if that fails.

        Returns the request, the client's program, the folder that the program has first in sys.path, and why the
        request is refused (None if it is accepted).
        """
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.geteuid():
            raise ValueError("a client of another user")
        connection.settimeout(5.0)
        size = array.array("i").itemsize
        data, passed, _, _ = socket.recv_fds(connection, 4 * (3 + _MOST_DESCRIPTORS), 1 + _MOST_DESCRIPTORS)
        connection.settimeout(None)
        passed = [_move(number) for number in passed]
        numbers = array.array("i", data[: len(data) // size * size])
        if len(numbers) < 3 or len(numbers) != 3 + numbers[2] or len(passed) != 1 + numbers[2]:
            for number in passed:
                os.close(number)
            raise ValueError("not a client's request")
        mask = struct.unpack("=Q", data[:8])[0]
        request = ForkRequest(
            pid=pid, mask=mask, leash=passed[0], descriptors=dict(zip(numbers[3:], passed[1:], strict=True))
        )
        command = read_command(pid)
        environ = read_environ(pid)
        self._linger_s = float(environ.get(LINGER_VARIABLE) or 0.0)
        host, _, owner = environ.get(OWNER_VARIABLE, "").partition(":")
        self._owner = owner if host == socket.gethostname() else ""
        if self._expected is None:
            with contextlib.suppress(Exception):
                self._expected = identify(environ, socket.gethostname()).host_size
        program = read_program(command)
        if isinstance(program, str):
            return request, None, None, self._refusal or program
        folder = folder_of(program, directory=os.readlink(f"/proc/{pid}/cwd"))
        return request, program, folder, self._refusal or self._why_not(pid, program, folder)

    def _why_not(self, pid: int, program: Program, folder: str | None) -> str | None:
        if self._program is None or program.options != self._program.options:
            return "ranks of this node have different options of Python"
        return self._imported.why_other(folder) or self._own.why_unlike(Likeness.of(pid))

    def _end(self, rank: _Rank) -> None:
        _, status = os.waitpid(rank.pid, 0)
        with contextlib.suppress(OSError):
            rank.connection.send(f"e{status}".encode())
        rank.connection.close()
        os.close(rank.pidfd)
        self._ranks.remove(rank)
        self._idle_since_s = time.monotonic()

    def _follow_suspended(self) -> None:
        """Suspends ranks whose clients are suspended, since a client cannot forward SIGSTOP, and continues them."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                suspended = read_status(rank.client)["State"].startswith("T")
                if suspended and not rank.suspended:
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGSTOP)
                elif rank.suspended and not suspended:
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGCONT)
                rank.suspended = suspended


def _remove(socket_path: Path) -> None:
    """Removes a server's files. Call it with the lock held. Raises OSError."""
    socket_path.unlink(missing_ok=True)
    socket_path.with_name(socket_path.name + ".log").unlink(missing_ok=True)
    socket_path.with_name(socket_path.name + ".lock").unlink()


def _move(number: int) -> int:
    """Replaces a file descriptor by a copy with a number that no rank needs, and returns the copy."""
    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FROM)
    os.close(number)
    return moved


def cannot_fork() -> str | None:
    """Returns why this system cannot run a fork server; None if a fork server can run."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return "Linux is older than 5.3, or does not allow pidfd_open"
    return None


def ignore_batch_signals() -> None:
    """Ignores the signals that a batch system sends to all processes of a job: the server ends when its ranks end."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGTSTP,
    ):
        signal.signal(number, signal.SIG_IGN)
