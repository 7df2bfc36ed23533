"""Probes whether this host can reach the other hosts of the run, without listening on any port.

The library that communicates does not say which link is dead; it only waits. So each rank reserves a TCP port on which
nothing listens, and when an operation is late, the ranks that wait try to connect to one another's. A kernel answers a
connection to such a port with a refusal, which proves that the link works; no answer within the time limit does not.
While all is well nothing is sent.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import psutil

from hpctrain.comm.watchdog.tcp_probe import ProbeTarget, probe_hosts

_MAX_ADDRESSES = 8
MAX_HOSTS = 64


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


def targets_of_others(
    targets: Iterable[ProbeTarget], *, here: str, max_hosts: int = MAX_HOSTS
) -> tuple[ProbeTarget, ...]:
    """Returns one target for each other host; of more than `max_hosts` hosts a random choice, another on each rank."""
    by_host = {target.host: target for target in targets if target.host != here and target.addresses}
    hosts = sorted(by_host)
    drawn = hosts if len(hosts) <= max_hosts else random.sample(hosts, max_hosts)
    return tuple(by_host[host] for host in drawn)


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
        self._probing = threading.Lock()
        self._probed: float | None = None  # monotonic

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

    def probe_soon(self, *, timeout_s: float, at_most_every_s: float, then: Callable[[], None]) -> None:
        """Probes in another thread, which then calls `then`; not if that was done recently, or is being done."""
        if not self.targets or not self._probing.acquire(blocking=False):
            return
        if self._probed is not None and time.monotonic() < self._probed + at_most_every_s:
            self._probing.release()
            return

        def look() -> None:
            try:
                self.probe(timeout_s=timeout_s)
                self._probed = time.monotonic()
            finally:
                self._probing.release()
            with contextlib.suppress(OSError):
                then()

        threading.Thread(target=look, name="hpctrain-reach", daemon=True).start()

    def await_probe(self, *, within_s: float) -> None:
        """Waits for the end of the probe that `probe_soon` has begun."""
        if self._probing.acquire(timeout=within_s):
            self._probing.release()

    def _probe(self, targets: Sequence[ProbeTarget], *, timeout_s: float) -> dict[str, bool]:
        return probe_hosts(targets, timeout_s=timeout_s, own=() if self.own is None else self.own.addresses)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
