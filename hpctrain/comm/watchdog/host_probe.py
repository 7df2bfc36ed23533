"""Probes whether this host can reach the other hosts of the run, without listening on any port.

The library that communicates does not say which link is dead; it only waits. So each rank reserves a TCP port on which
nothing listens, and when an operation is late, the ranks that wait try to connect to one another's. A kernel answers a
connection to such a port with a refusal, which proves that the link works; no answer within the time limit does not.
While all is well nothing is sent.
"""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import psutil

from hpctrain.comm.watchdog.rank_status import RankPosition

_MAX_ADDRESSES = 8
MAX_HOSTS = 64
# Maximum number of ranks whose files are read to find the hosts: most ranks of a large node need not be read.
MAX_RANKS_READ = 256
# An answer from the host's kernel, whether or not something listens on the port by now.
_ANSWERS = (0, errno.ECONNREFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """A host, the addresses by which others may reach it, and the port that one of its ranks has reserved."""

    host: str
    addresses: tuple[str, ...]
    port: int


def host_addresses() -> tuple[str, ...]:
    """Returns the addresses by which other hosts may reach this one: of interfaces that are up, without loopback."""
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries:
                # Addresses that are valid on one link only (fe80::...%eth0) mean nothing on another host.
                local = entry.address.startswith(("127.", "169.254.", "fe80:")) or entry.address == "::1"
                if name in up and entry.family == family and not local:
                    found.append(entry.address)
    return tuple(found[:_MAX_ADDRESSES])


@final
class ReservedPort:
    """A TCP port of this host that no other program can listen on; nothing of ours does either. Raises OSError."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if both:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(("", 0))
        except OSError:
            self._socket.close()
            raise
        self.target = ProbeTarget(
            host=socket.gethostname(), addresses=host_addresses(), port=self._socket.getsockname()[1]
        )

    def close(self) -> None:
        self._socket.close()


def targets_of(positions: Iterable[RankPosition]) -> list[ProbeTarget]:
    """Returns the targets that the ranks have written into their files."""
    return [
        ProbeTarget(host=position.host, addresses=tuple(position.addresses), port=position.port)
        for position in positions
        if position.port is not None and position.addresses
    ]


def targets_of_others(
    targets: Iterable[ProbeTarget], *, here: str, max_hosts: int = MAX_HOSTS
) -> tuple[ProbeTarget, ...]:
    """Returns one target for each other host; of more than `max_hosts` hosts a random choice, another on each rank."""
    by_host = {target.host: target for target in targets if target.host != here and target.addresses}
    hosts = sorted(by_host)
    drawn = hosts if len(hosts) <= max_hosts else random.sample(hosts, max_hosts)
    return tuple(by_host[host] for host in drawn)


def ranks_to_read(members: Sequence[int], *, max_ranks: int = MAX_RANKS_READ) -> list[int]:
    """Returns the ranks whose files are read to find the hosts: all, or `max_ranks` chosen at random."""
    return list(members) if len(members) <= max_ranks else random.sample(list(members), max_ranks)


def probe(targets: Sequence[ProbeTarget], *, timeout_s: float, own: Sequence[str] = ()) -> dict[str, bool]:
    """Returns host -> whether its kernel answered at any of its addresses. Takes at most `timeout_s` for all together.

    own: addresses of this host, which other hosts may have too (the bridge of a container runtime); they are left out.
    """
    found = {target.host: False for target in targets if set(target.addresses) - set(own)}
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for target in targets:
            for address in target.addresses:
                if address not in own:
                    _begin(selector, target, address=address, found=found)
        while selector.get_map() and (left_s := end - time.monotonic()) > 0 and not all(found.values()):
            for key, _ in selector.select(left_s):
                caller = key.fileobj
                assert isinstance(caller, socket.socket)
                found[key.data] |= caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS
                selector.unregister(caller)
                caller.close()
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
    return found


def _begin(
    selector: selectors.BaseSelector, target: ProbeTarget, *, address: str, found: dict[str, bool]
) -> None:
    """Begins a connection; `selector` then holds it with the name of the host, unless its outcome is known."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        caller = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return
    code = caller.connect_ex((address, target.port))
    if code != errno.EINPROGRESS:
        found[target.host] |= code in _ANSWERS
        caller.close()
        return
    selector.register(caller, selectors.EVENT_WRITE, target.host)


@final
class HostReachability:
    """State of one rank's probes. Used by several threads; each value is replaced as a whole.

    others: the other hosts; None until they are known. targets: those that have answered before. found: host -> whether
    it answered the last probe.
    """

    def __init__(self) -> None:
        self.here = socket.gethostname()
        self._port: ReservedPort | None = None
        with contextlib.suppress(OSError):
            self._port = ReservedPort()
        self.own: ProbeTarget | None = None if self._port is None else self._port.target
        self.others: tuple[ProbeTarget, ...] | None = None
        self.targets: tuple[ProbeTarget, ...] = ()
        self.found: Mapping[str, bool] = {}

    def learn(self, *, timeout_s: float) -> bool:
        """Adds those of `others` that answer now to `targets`. Returns True if all of them have answered.

        A host behind a firewall that drops packets never answers, so that its silence means nothing later.
        """
        known = {target.host for target in self.targets}
        targets = [target for target in self.others or () if target.host not in known]
        answers = self._probe(targets, timeout_s=timeout_s)
        self.targets = (*self.targets, *(target for target in targets if answers.get(target.host)))
        return all(answers.get(target.host) for target in targets)

    def probe(self, *, timeout_s: float) -> None:
        """Probes all `targets`; those that did not answer a second time, since a packet may be lost."""
        self.found = found = self._probe(self.targets, timeout_s=timeout_s)
        silent = [target for target in self.targets if not found.get(target.host)]
        if silent:
            self.found = {**found, **self._probe(silent, timeout_s=timeout_s)}

    def _probe(self, targets: Sequence[ProbeTarget], *, timeout_s: float) -> dict[str, bool]:
        return probe(targets, timeout_s=timeout_s, own=() if self.own is None else self.own.addresses)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
