"""Probes whether this host can reach the other hosts of the run, without listening on any port.

The communication library does not report which link is dead; it only waits. So each rank reserves a TCP port on which
nothing listens, and when an operation is late, the waiting ranks try to connect to one another's ports. A kernel
refuses a connection to such a port, and the refusal proves that the link works. If there is no answer within the time
limit, the link does not work. As long as no operation is late, nothing is sent.

This module loads neither torch nor MPI, so that a program that only watches nodes stays small.
"""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import psutil

# Outcomes that prove that the host is up: its kernel has accepted or refused the connection.
ANSWERS = (0, errno.ECONNREFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """A host to probe.

    host: name of the host.
    addresses: addresses by which other hosts may reach the host.
    port: TCP port of the host, such as one that a rank there has reserved.
    """

    host: str
    addresses: tuple[str, ...]
    port: int


def probe_hosts(
    targets: Sequence[ProbeTarget],
    *,
    timeout_s: float,
    own: Sequence[str] = (),
    answers: Sequence[int] = ANSWERS,
) -> dict[str, bool]:
    """Returns for each host whether its kernel answered at any of its addresses. Takes at most `timeout_s` in all.

    own: addresses of this host, which are skipped; other hosts may have them too (the bridge of a container runtime).
    answers: results of connect (0 or an errno) that count as an answer. With only 0, a program must listen on the port.
    """
    found = {target.host: False for target in targets if set(target.addresses) - set(own)}
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for target in targets:
            for address in target.addresses:
                if address not in own:
                    _begin(selector, target, address=address, found=found, answers=answers)
        while selector.get_map() and (left_s := end - time.monotonic()) > 0 and not all(found.values()):
            for key, _ in selector.select(left_s):
                caller = key.fileobj
                assert isinstance(caller, socket.socket)
                found[key.data] |= caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in answers
                selector.unregister(caller)
                caller.close()
        for key in list(selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
    return found


def _begin(
    selector: selectors.BaseSelector,
    target: ProbeTarget,
    *,
    address: str,
    found: dict[str, bool],
    answers: Sequence[int],
) -> None:
    """Starts a connection and registers it in `selector` under the host's name, unless its outcome is known at once."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        caller = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return
    code = caller.connect_ex((address, target.port))
    if code != errno.EINPROGRESS:
        found[target.host] |= code in answers
        caller.close()
        return
    selector.register(caller, selectors.EVENT_WRITE, target.host)


# Probes whether this host can reach the other hosts of the run, without listening on any port.


_MAX_ADDRESSES = 8
MAX_HOSTS = 64


def host_addresses() -> tuple[str, ...]:
    """Returns the addresses by which other hosts may reach this host.

    These are the addresses of interfaces that are up, except loopback and link-local addresses; at most eight.
    """
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
    """A TCP port of this host that no program can listen on, because this object holds it. Raises OSError."""

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
    """Returns one target per other host.

    If there are more than `max_hosts` other hosts, each rank chooses `max_hosts` of these hosts at random.
    """
    by_host = {target.host: target for target in targets if target.host != here and target.addresses}
    hosts = sorted(by_host)
    drawn = hosts if len(hosts) <= max_hosts else random.sample(hosts, max_hosts)
    return tuple(by_host[host] for host in drawn)


@final
class HostReachability:
    """State of one rank's probes. Several threads use this object; each attribute is replaced as a whole.

    others: targets on all other hosts; None until they are known.
    targets: those of `others` that have answered before.
    found: for each host, whether it answered the last probe.
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
        """Probes those of `others` that have not answered yet, and adds to `targets` those that answer now.

        Returns True if all `others` have answered. A host that has never answered, such as one behind a firewall that
        drops packets, is not a target: its later silence would mean nothing.
        """
        known = {target.host for target in self.targets}
        targets = [target for target in self.others or () if target.host not in known]
        answers = self._probe(targets, timeout_s=timeout_s)
        self.targets = (*self.targets, *(target for target in targets if answers.get(target.host)))
        return all(answers.get(target.host) for target in targets)

    def probe(self, *, timeout_s: float) -> None:
        """Probes all `targets`. Targets that do not answer are probed a second time, since a packet may be lost."""
        self.found = found = self._probe(self.targets, timeout_s=timeout_s)
        silent = [target for target in self.targets if not found.get(target.host)]
        if silent:
            self.found = {**found, **self._probe(silent, timeout_s=timeout_s)}

    def probe_soon(self, *, timeout_s: float, at_most_every_s: float, then: Callable[[], None]) -> None:
        """Probes all `targets` in another thread, which calls `then` afterwards.

        Does nothing if a probe is running, or if the last one ended less than `at_most_every_s` seconds ago.
        """
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
        """Waits for the end of the probe that `probe_soon` has started."""
        if self._probing.acquire(timeout=within_s):
            self._probing.release()

    def _probe(self, targets: Sequence[ProbeTarget], *, timeout_s: float) -> dict[str, bool]:
        return probe_hosts(targets, timeout_s=timeout_s, own=() if self.own is None else self.own.addresses)

    def close(self) -> None:
        if self._port is not None:
            self._port.close()


def find_cut(findings: Mapping[str, Mapping[str, bool]], *, here: str) -> list[str]:
    """Returns lines for the user that name the hosts that are cut off. Pure.

    findings: findings[a][b] is True if host b answered a probe from host a.
    here: name of this host.

    The list is empty if nothing was probed or all hosts answered. Hosts that reach each other, in either direction,
    form a part; the largest part is taken as the network, and the other parts are cut off from it.
    """
    asked = {
        host: {other: answered for other, answered in found.items() if other != host}
        for host, found in findings.items()
    }
    asked = {host: found for host, found in asked.items() if found}
    if all(all(found.values()) for found in asked.values()):
        return []
    if list(asked) == [here]:
        return _alone(asked[here], here=here)
    parts = _parts(asked)
    largest = max(len(part) for part in parts)
    if [len(part) for part in parts].count(largest) > 1:
        names = " | ".join(name_hosts(part) for part in parts)
        return [f"the hosts form groups that do not reach each other: {names}"]
    lines = []
    for part in parts:
        if len(part) == largest:
            continue
        for host in part:
            lines.append(_cut_host(host, asked=asked, here=here))
    return lines or [_one_way(asked, here=here)]


def _alone(found: Mapping[str, bool], *, here: str) -> list[str]:
    """Returns lines for the user that follow from the probes of this host alone.

    found: for each probed host, whether it answered.
    here: name of this host.
    """
    missing = sorted(host for host, answered in found.items() if not answered)
    if len(missing) < len(found):
        return [
            f"{host} cannot be reached from {here} (this host), which reaches others: "
            f"the link of {host} is cut, or the node is down"
            for host in missing
        ]
    if len(missing) == 1:
        return [f"{missing[0]} cannot be reached from {here} (this host): the link of one of the two is cut"]
    return [_own_link(here, others=missing)]


def _own_link(here: str, *, others: list[str]) -> str:
    return (
        f"{here} (this host) reaches none of the {len(others)} others asked ({name_hosts(others)}): "
        "its own link is cut"
    )


def _cut_host(host: str, *, asked: Mapping[str, Mapping[str, bool]], here: str) -> str:
    if host == here:
        return _own_link(here, others=sorted(other for other, got in asked.get(here, {}).items() if not got))
    without = sorted(other for other, found in asked.items() if found.get(host) is False)
    if not without:
        return f"{host} reaches none of the hosts that reach one another: its link is cut"
    names = name_hosts([f"{other} (this host)" if other == here else other for other in without])
    return f"{host} cannot be reached from {names}: its link is cut, or the node is down"


def _one_way(asked: Mapping[str, Mapping[str, bool]], *, here: str) -> str:
    pairs = [
        f"{host} does not reach {other}"
        for host, found in sorted(asked.items())
        for other, answered in sorted(found.items())
        if not answered
    ]
    return "some hosts do not reach each other directly: " + "; ".join(pairs[:8])


def _parts(asked: Mapping[str, Mapping[str, bool]]) -> list[list[str]]:
    """Returns the connected parts of the network, each as a sorted list of hosts; the parts are sorted too.

    asked: asked[a][b] is True if host b answered a probe from host a. Then a and b are in the same part.
    """
    part_of = {host: {host} for found in asked.values() for host in found} | {host: {host} for host in asked}
    for host, found in asked.items():
        for other, answered in found.items():
            if answered and part_of[host] is not part_of[other]:
                smaller, larger = sorted((part_of[host], part_of[other]), key=len)
                larger |= smaller
                for member in smaller:
                    part_of[member] = larger
    return sorted({tuple(sorted(part)): sorted(part) for part in part_of.values()}.values())


def name_hosts(hosts: list[str]) -> str:
    """Returns a text such as `a, b, c`; after eight names, only the number of the remaining hosts."""
    rest = len(hosts) - 8
    return ", ".join(hosts[:8]) + (f" and {rest} more" if rest > 0 else "")
