"""Signals and failure reports for the ranks of Hydra, the launcher of MPICH and Intel MPI.

Hydra forwards SIGUSR1 to the ranks, but no other signal of a user: SIGUSR2 ends Hydra and the ranks.

Hydra's messages do not identify the rank that failed first. If a signal ended a rank, MPICH's message names a process
that has ended, which is not always the first, together with the bitwise OR of the statuses of all ranks. Intel MPI's
message lists all ranks, because Intel MPI has killed the other ranks. So this module watches which rank ends first.
Linux 6.15 and newer also report how that rank ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import time
from itertools import takewhile
from pathlib import Path
from typing import final

from hpctrain.launch.failure import RankFailure
from hpctrain.launch.rank_identity.launcher_process import forked_for, is_client

_PROXIES = ("hydra_pmi_proxy", "hydra_bstrap_pr")  # as /proc cuts the names
_LOOKS_FOR_S = 20.0
# From linux/pidfd.h: ioctl request, size of its structure, mask bit for the exit status, and offset of that status.
_GET_INFO, _INFO_BYTES, _INFO_EXIT, _EXIT_STATUS_AT = 0xC040FF0B, 64, 8, 60

_PROCESS = re.compile(rb"=\s+(?:RANK \d+ )?PID (?P<pid>\d+) RUNNING AT (?P<node>\S+)")
_CODE = re.compile(rb"=\s+EXIT CODE: (?P<code>\d+)")
_SIGNAL = re.compile(rb"EXIT STRING: .*\(signal (?P<mpich>\d+)\)|=\s+KILLED BY SIGNAL: (?P<intel>\d+)")


@final
class HydraRanks:
    """The ranks of a Hydra launcher that run on this machine.

    launcher: process id of the launcher.
    num_ranks: number of ranks of the whole run.

    Call `look` twice per second, and more often while `is_looking` returns True: the order in which ranks end is known
    only for ranks that `look` has found before they end.
    """

    def __init__(self, launcher: int, *, num_ranks: int) -> None:
        self._launcher = launcher
        self._num_ranks = num_ranks
        self._until_s = time.monotonic() + _LOOKS_FOR_S
        self._ranks: dict[int, int] = {}  # process -> rank
        self._ended: list[tuple[int, int]] = []  # ranks and their pidfds, in the order in which they ended
        self._descriptors: dict[int, int] = {}  # pidfd -> process, of those that run
        self._clients: dict[int, int] = {}  # of a fork server: process that stands for a rank -> its pidfd
        self._epoll = select.epoll()
        self._reported: tuple[int, str] | None = None  # process and node, of the launcher's last message
        self._code: int | None = None

    def look(self) -> None:
        """Finds ranks that have started (until all are known, or for 20 s), and records those that have ended."""
        if self.is_looking():
            for pid, rank in _ranks_under(self._launcher):
                if pid not in self._ranks:
                    self._add(pid, rank)
        self._find_forked()
        for descriptor, _ in self._epoll.poll(timeout=0):  # in the order of the events
            self._ended.append((self._ranks[self._descriptors.pop(descriptor)], descriptor))
            self._epoll.unregister(descriptor)

    def is_looking(self) -> bool:
        """Returns True while not all ranks are known, for at most 20 s."""
        is_complete = len({*self._ranks.values()}) == self._num_ranks and not self._clients
        return not is_complete and time.monotonic() < self._until_s

    def send(self, number: int) -> int:
        """Sends the signal `number` to each rank on this machine. Returns the number of ranks."""
        self._until_s = max(self._until_s, time.monotonic() + 0.1)
        self.look()
        for pid in self._descriptors.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(self._descriptors)

    def find_failure(self, line: bytes) -> RankFailure | None:
        """Returns the rank that failed first, once the launcher's output reports a failure; otherwise None.

        Before Linux 6.15 only a rank that was ended by a signal is found, and the result's `signal` may be None.
        `signal` is None if MPICH's message does not tell the signal, because the message combines the statuses of all
        ranks, including ranks that MPICH has killed, or is about another process.

        line: the next line of the launcher's output.
        """
        process = _PROCESS.search(line)
        if process is not None:
            self._reported = int(process["pid"]), process["node"].decode(errors="replace")
        code, ended = _CODE.search(line), _SIGNAL.search(line)
        if code is not None:
            self._code = int(code["code"])
        if self._reported is None or (code is None and ended is None):
            return None
        self.look()
        pid, node = self._reported
        rank, status = self._first()
        if status is not None and os.WIFEXITED(status):
            return RankFailure(rank=str(rank), node=node, exit_code=os.WEXITSTATUS(status))
        if ended is None:
            return None
        if status is not None:
            number = os.WTERMSIG(status)
            return RankFailure(rank=str(rank), node=node, exit_code=128 + number, signal=number)
        rank = self._ranks.get(pid) if rank is None else rank
        is_first = rank is None or self._ranks.get(pid) == rank
        name = f"of process {pid}" if rank is None else str(rank)
        if ended["intel"] is not None:
            number = int(ended["intel"])
            # It lists all ranks.
            return (
                RankFailure(rank=name, node=node, exit_code=128 + number, signal=number) if is_first else None
            )
        number = int(ended["mpich"])
        if not is_first:
            return RankFailure(rank=name, node=node, exit_code=128 + number)
        number = number if self._code is None else self._code
        return RankFailure(rank=name, node=node, exit_code=128 + number, signal=number)

    def left_before(self) -> list[int]:
        """Returns the ranks that exited with 0 before the first rank that failed."""
        return [rank for rank, _ in takewhile(lambda ended: _status_of(ended[1]) == 0, self._ended)]

    def first_code(self) -> int | None:
        """Returns the exit code of the first rank that did not end with 0; None if Linux does not report it."""
        self.look()
        _, status = self._first()
        return os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None

    def close(self) -> None:
        for descriptor in (*self._descriptors, *(descriptor for _, descriptor in self._ended)):
            os.close(descriptor)
        self._epoll.close()

    def _first(self) -> tuple[int | None, int | None]:
        """Returns the first rank that did not end with 0, and its wait status. Each of the two is None if unknown."""
        for rank, descriptor in self._ended:
            status = _status_of(descriptor)
            if status != 0:
                return rank, status
        return None, None

    def _add(self, pid: int, rank: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it has ended, or Linux is older than 5.3
            return
        self._ranks[pid] = rank
        self._descriptors[descriptor] = pid
        self._epoll.register(descriptor, select.EPOLLIN)
        if is_client(pid):
            self._clients[pid] = descriptor

    def _find_forked(self) -> None:
        """Watches forked ranks instead of their clients (the processes that the launcher has started in their place).

        Other ranks may notice the end of a forked rank sooner than its client does, and be ended before the client.
        """
        for client, descriptor in [*self._clients.items()]:
            if descriptor not in self._descriptors or not is_client(client):
                del self._clients[client]  # it has ended, or become the rank itself
            elif (forked := forked_for(client)) is not None:
                del self._clients[client]
                self._add(forked, self._ranks[client])
                if forked in self._ranks:
                    self._epoll.unregister(descriptor)
                    del self._descriptors[descriptor]
                    os.close(descriptor)


def _status_of(descriptor: int) -> int | None:
    """Returns the wait status of a process that has ended and was waited for; None if Linux does not report it."""
    info = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info)
    (status,) = struct.unpack_from("=i", info, _EXIT_STATUS_AT)
    return status if mask & _INFO_EXIT else None


def _ranks_under(launcher: int) -> list[tuple[int, int]]:
    """Returns (process id, rank) of each child of a Hydra proxy that the launcher has started."""
    parents: dict[int, int] = {}
    proxies = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                command, _, rest = Path(f"/proc/{name}/stat").read_text().rpartition(")")
                parents[int(name)] = int(rest.split()[1])
                if command.partition("(")[2].startswith(_PROXIES):
                    proxies.add(int(name))
    own = {pid for pid in proxies if _is_under(pid, launcher, parents)}
    found: list[tuple[int, int]] = []
    for pid, parent in parents.items():
        if parent in own and pid not in proxies:
            with contextlib.suppress(OSError, ValueError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [text for text in variables if text.startswith(b"PMI_RANK=")]
                found.extend((pid, int(text.partition(b"=")[2])) for text in ranks)
    return found


def _is_under(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid == ancestor:
            return True
        pid = parents[pid]
    return False
