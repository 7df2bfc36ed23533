"""Whether this host can reach the others: a door on each rank, and a knock on all doors when something is late.

The library that communicates does not say which link is dead; it only waits. So each rank's watcher listens on
a TCP port of its own, and when an operation is late the ranks that wait try to connect to one another's. In
normal running nobody knocks: a thread sleeps in `accept`.
"""

from __future__ import annotations

import contextlib
import errno
import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

import psutil

from hpctrain.comm.watchdog.rank_status import RankPosition

_GREETING = b"hpctrain "
_TOKEN_BYTES = 8
_MAX_ADDRESSES = 8
MAX_HOSTS = 64
# Files to read for the doors of so many hosts, at most: most ranks of a big node need not be asked.
MAX_RANKS_READ = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where one rank listens. token: what it answers with, so that another service is not taken for it."""

    host: str
    addresses: tuple[str, ...]
    port: int
    token: str


def host_addresses() -> tuple[str, ...]:
    """Addresses of this host that others may reach it by: of interfaces that are up, without loopback."""
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries:
                # Addresses that hold on one link only (fe80::...%eth0) mean nothing on another host.
                local = entry.address.startswith(("127.", "169.254.", "fe80:")) or entry.address == "::1"
                if name in up and entry.family == family and not local:
                    found.append(entry.address)
    return tuple(found[:_MAX_ADDRESSES])


@final
class Listener:
    """Answers every connection with a fixed greeting and closes it; reads nothing. Raises OSError."""

    def __init__(self) -> None:
        token = secrets.token_hex(_TOKEN_BYTES)
        both = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, backlog=256, dualstack_ipv6=both
        )
        self.door = Door(
            host=socket.gethostname(),
            addresses=host_addresses(),
            port=self._socket.getsockname()[1],
            token=token,
        )
        self._answer = _GREETING + token.encode() + b"\n"
        threading.Thread(target=self._serve, name="hpctrain-listener", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    time.sleep(0.1)
                    continue
                return  # closed
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)  # so short an answer fits, or the caller is a nuisance
                connection.send(self._answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone would leave the thread in `accept`
        self._socket.close()


def doors_of_others(
    positions: Iterable[RankPosition], *, here: str, max_hosts: int = MAX_HOSTS
) -> tuple[Door, ...]:
    """One door for each other host, at most `max_hosts` of them, drawn anew on each rank."""
    doors: dict[str, Door] = {}
    for position in positions:
        if position.host != here and position.port is not None and position.addresses:
            doors[position.host] = Door(
                host=position.host,
                addresses=tuple(position.addresses),
                port=position.port,
                token=position.token,
            )
    hosts = sorted(doors)
    drawn = hosts if len(hosts) <= max_hosts else random.sample(hosts, max_hosts)
    return tuple(doors[host] for host in drawn)


def ranks_to_read(members: Sequence[int], *, max_ranks: int = MAX_RANKS_READ) -> list[int]:
    """The ranks whose files are read for their doors: all, or so many drawn."""
    return list(members) if len(members) <= max_ranks else random.sample(list(members), max_ranks)


class Proof(Enum):
    """What counts as an answer."""

    GREETING = "greeting"  # it is the rank that listens there
    CONNECTION = "connection"  # the host's kernel answers: the link is whole, though the rank may stand still


def knock(
    doors: Sequence[Door], *, timeout_s: float, own: Sequence[str] = (), proof: Proof = Proof.GREETING
) -> dict[str, bool]:
    """Host -> whether it answered on any of its addresses. Takes at most `timeout_s`, for all together.

    A host that refuses the connection is reached: its rank may have ended. own: addresses of this host, which
    other hosts may have too (a bridge for containers); they are left out.
    """
    found = {door.host: False for door in doors if set(door.addresses) - set(own)}
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for door in doors:
            for address in door.addresses:
                if address not in own:
                    _begin(selector, door, address=address, found=found)
        while selector.get_map() and (left_s := end - time.monotonic()) > 0 and not all(found.values()):
            for key, _ in selector.select(left_s):
                _go_on(selector, key, found=found, proof=proof)
        for key in list(selector.get_map().values()):
            _drop(selector, key.fileobj)
    return found


@dataclass(slots=True)
class _Call:
    door: Door
    received: bytes = b""
    connected: bool = False


def _begin(selector: selectors.BaseSelector, door: Door, *, address: str, found: dict[str, bool]) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        caller = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return
    code = caller.connect_ex((address, door.port))
    if code not in (0, errno.EINPROGRESS):
        found[door.host] |= code == errno.ECONNREFUSED
        caller.close()
        return
    selector.register(caller, selectors.EVENT_WRITE, _Call(door))


def _go_on(
    selector: selectors.BaseSelector, key: selectors.SelectorKey, *, found: dict[str, bool], proof: Proof
) -> None:
    caller, call = key.fileobj, key.data
    if not isinstance(caller, socket.socket):
        return
    if not call.connected:
        code = caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code or proof is Proof.CONNECTION:
            found[call.door.host] |= code in (0, errno.ECONNREFUSED)
            _drop(selector, caller)
            return
        call.connected = True
        selector.modify(caller, selectors.EVENT_READ, call)
        return
    expected = _GREETING + call.door.token.encode() + b"\n"
    try:
        piece = caller.recv(len(expected) - len(call.received))
    except OSError:
        piece = b""
    call.received += piece
    if piece and len(call.received) < len(expected):
        return
    found[call.door.host] |= call.received == expected
    _drop(selector, caller)


def _drop(selector: selectors.BaseSelector, caller: object) -> None:
    if isinstance(caller, socket.socket):
        selector.unregister(caller)
        caller.close()


@final
class HostReachability:
    """What one rank knows of the other hosts' doors. Used by several threads; each value is replaced whole."""

    def __init__(self) -> None:
        self.here = socket.gethostname()
        self.door: Door | None = None
        self._listener: Listener | None = None
        with contextlib.suppress(OSError):
            self._listener = Listener()
            self.door = self._listener.door
        self.doors: tuple[Door, ...] = ()
        self.found: Mapping[str, bool] = {}

    def learn(self, positions: Iterable[RankPosition], *, timeout_s: float) -> bool:
        """Take the doors of the hosts that answer now, beside those that have answered before; whether all have.

        Where a firewall is in the way, a later silence says nothing.
        """
        known = {door.host for door in self.doors}
        doors = [door for door in doors_of_others(positions, here=self.here) if door.host not in known]
        answers = self._knock(doors, timeout_s=timeout_s, proof=Proof.GREETING)
        self.doors = (*self.doors, *(door for door in doors if answers.get(door.host)))
        return all(answers.get(door.host) for door in doors)

    def look(self, *, timeout_s: float) -> None:
        """Knock on every door that is known; a second time where nobody answered, as a packet may be lost."""
        self.found = found = self._knock(self.doors, timeout_s=timeout_s, proof=Proof.CONNECTION)
        silent = [door for door in self.doors if not found.get(door.host)]
        if silent:
            self.found = {**found, **self._knock(silent, timeout_s=timeout_s, proof=Proof.CONNECTION)}

    def _knock(self, doors: Sequence[Door], *, timeout_s: float, proof: Proof) -> dict[str, bool]:
        own = () if self.door is None else self.door.addresses
        return knock(doors, timeout_s=timeout_s, own=own, proof=proof)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
