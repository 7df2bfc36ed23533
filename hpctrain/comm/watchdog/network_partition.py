"""Finds hosts that are cut off, from probes between hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def find_cut(findings: Mapping[str, Mapping[str, bool]], *, here: str) -> list[str]:
    """Returns lines for the user that name the hosts cut off. findings[a][b]: b answered a's probe. here: this host.

    Empty if nothing was probed, or all hosts answered. Hosts that reach one another in either direction form a
    part; the largest part is the network, and the others are cut off from it.
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
        return [f"the hosts fall into parts that do not reach each other: {names}"]
    lines = []
    for part in parts:
        if len(part) == largest:
            continue
        for host in part:
            lines.append(_cut_host(host, asked=asked, here=here))
    return lines or [_one_way(asked, here=here)]


def _alone(found: Mapping[str, bool], *, here: str) -> list[str]:
    """Lines from the probes of this host only."""
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
    """Connected parts of the graph of hosts, sorted by name; each a sorted list."""
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
    """Returns `a, b, c`; after eight names the number of the others."""
    rest = len(hosts) - 8
    return ", ".join(hosts[:8]) + (f" and {rest} more" if rest > 0 else "")
