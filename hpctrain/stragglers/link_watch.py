"""When the links between nodes are measured during a run, and which of them are named as slow. Pure.

A slow link delays the reduction of all ranks by the same time, so no rank's own work shows it. The communication floor
does: the time that even the last rank to arrive waits. When the floor has risen, a short probe of the links finds the
slow one, if it is a link at all.
"""

from __future__ import annotations

from typing import final

from hpctrain.stragglers.node_probe import Links
from hpctrain.stragglers.probe_findings import Finding, Quantity, slow_links
from hpctrain.stragglers.slow_ranks import LEAST_EXCESS_S, Limits
from hpctrain.stragglers.slowness import Cause, Change, Slow
from hpctrain.topology import Topology

# A floor that has changed by this factor since the last probe calls for another one.
_CHANGED = 1.5
# After probes that find nothing the next ones wait for longer streaks, up to so many windows.
_MOST_WINDOWS = 60


@final
class LinkWatch:
    """Asks for probes (`wants_probe`), and judges them (`probed`). A link is named after two probes in a row found it.

    before: the links at the start of the run; None: the first window's probe measures them.
    """

    def __init__(self, topology: Topology, *, limits: Limits = Limits(), before: Links | None = None) -> None:
        self._topology = topology
        self._limits = limits
        self._before = before
        self._needed = limits.windows
        self._level_s: float | None = None  # the floor when the links were measured last
        self._floor_s = 0.0
        self._step_s = 0.0
        self._streak = 0
        self._suspected: dict[tuple[str, ...], Finding] = {}
        self._named: dict[tuple[str, ...], Slow] = {}

    @property
    def named(self) -> list[Slow]:
        """What is slow now."""
        return list(self._named.values())

    def wants_probe(self, *, floor_s: float, step_s: float) -> bool:
        """Judges a window. floor_s, step_s: of its steps. Returns True if the links should be measured now."""
        self._floor_s, self._step_s = floor_s, step_s
        if self._before is None or self._suspected:
            return True
        if self._level_s is None:
            self._level_s = floor_s
        risen = self._matters(floor_s) and floor_s >= _CHANGED * self._level_s
        fallen = bool(self._named) and floor_s * _CHANGED <= self._level_s
        self._streak = self._streak + 1 if risen or fallen else 0
        if not self._named:
            self._level_s = min(self._level_s, floor_s)
        return self._streak >= self._needed

    def probed(self, links: Links) -> list[Change]:
        """Judges a probe of the window that `wants_probe` has seen last. Returns what is new."""
        found = {
            finding.nodes: finding
            for finding in slow_links(
                links.nodes, links.pairs, topology=self._topology,
                before=self._before.nodes if self._before is not None else None,
            )
            if finding.quantity is Quantity.BANDWIDTH  # latencies vary too much under other load
        }  # fmt: skip
        first, self._before = self._before is None, self._before or links
        level_s, self._streak = self._level_s, 0
        changes = [Change(slow, ended=True) for nodes, slow in self._named.items() if nodes not in found]
        self._named = {nodes: slow for nodes, slow in self._named.items() if nodes in found}
        new = {nodes: finding for nodes, finding in found.items() if nodes not in self._named}
        if not (new and self._matters(self._floor_s)):
            self._suspected = {}
            self._level_s = self._floor_s
            in_vain = not (first or changes)
            self._needed = min(2 * self._needed, _MOST_WINDOWS) if in_vain else self._limits.windows
            return changes
        confirmed = [nodes for nodes in new if nodes in self._suspected]
        self._suspected = {} if confirmed else new
        for nodes in confirmed:
            slow = self._slow(new[nodes], level_s=level_s)
            self._named[nodes] = slow
            changes.append(Change(slow))
        if confirmed:
            self._needed = self._limits.windows
            self._level_s = self._floor_s
        return changes

    def _matters(self, floor_s: float) -> bool:
        return floor_s >= max(self._limits.min_excess * self._step_s, LEAST_EXCESS_S)

    def _slow(self, finding: Finding, *, level_s: float | None) -> Slow:
        calm_s = level_s if level_s is not None and level_s < self._floor_s else 0.0
        return Slow(
            ranks=finding.ranks, nodes=finding.nodes, cause=Cause.NETWORK, value=finding.value,
            usual=finding.usual, wait_s=self._floor_s - calm_s, before=finding.before,
        )  # fmt: skip
