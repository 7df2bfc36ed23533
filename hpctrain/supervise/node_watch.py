"""Watches the nodes of a running step. A node whose kernel or Slurm daemon is gone is lost, long before Slurm says so.

srun itself does not end, nor print anything, when all processes of a node are killed or its link is cut (Slurm 22.05).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import final

import psutil

from hpctrain.comm import ProbeTarget, probe_hosts

# "Discard": on most nodes nothing listens there, and the kernel refuses the connection; what does listen ignores it.
_KERNEL_PORT = 9
_INTERVAL_S = 1.0
_AGAIN_S = 0.2  # after a missing answer
_TIMEOUT_S = 1.2  # a lost packet is sent again after a second
# A packet may be lost, so that a single missing answer proves nothing.
_SILENCES = 2


@final
class NodeWatch:
    """Probes nodes every _INTERVAL_S seconds, by two methods.

    Their kernels: a connection to a port on which nothing listens is refused by a kernel that is alive. A node that
    has never answered (a firewall that drops packets) is not judged. And srun's connections: the daemon of a step on
    each node (slurmstepd) has one to srun, for the ranks' output. When it is gone, the ranks there have ended, or the
    node has lost its processes: which of the two, slurmd answers. It is asked only then, since it logs each connection.

    addresses: of each node, by name.
    """

    def __init__(
        self, nodes: Sequence[str], *, addresses: Mapping[str, tuple[str, ...]], slurmd_port: int
    ) -> None:
        self._addresses = {node: addresses[node] for node in nodes if addresses.get(node)}
        self._slurmd_port = slurmd_port
        self._srun: psutil.Process | None = None
        self._answered: dict[str, float] = {}  # node -> time (epoch) at which its kernel last answered
        self._connected: dict[str, float] = {}  # node -> time at which it was last connected to srun
        self._ended: set[str] = set()  # nodes whose ranks have ended while slurmd lives
        self._silences: dict[tuple[str, str], int] = {}  # node, what was asked -> silences in a row
        self._next_s = 0.0

    def launched(self, pid: int) -> None:
        """Tells the process id of srun."""
        self._srun = psutil.Process(pid)

    def look(self) -> None:
        """Probes the nodes if it is time to. Takes milliseconds if all answer, and at most twice _TIMEOUT_S."""
        if not self._addresses or time.monotonic() < self._next_s:
            return
        asked = time.time()
        self.note_kernels(self._probe(list(self._addresses), port=_KERNEL_PORT), asked=asked)
        suspects = self.note_connections(self._connected_nodes(), asked=asked)
        if suspects:
            answers = self._probe(suspects, port=self._slurmd_port, outcomes=(0,))
            self.note_daemons(answers)
        silent = any(self._silences.values())
        self._next_s = time.monotonic() + (_AGAIN_S if silent else _INTERVAL_S)

    def lost(self) -> dict[str, float]:
        """Returns the lost nodes, each with the time (epoch) at which it was last known to be well."""
        return {
            node: (self._answered if what == "kernel" else self._connected)[node]
            for (node, what), count in self._silences.items()
            if count >= _SILENCES
        }

    def note_kernels(self, answers: Mapping[str, bool], *, asked: float) -> None:
        """Takes in whether each node's kernel has answered at the time `asked` (epoch)."""
        for node, answered in answers.items():
            if answered:
                self._answered[node] = asked
            if node in self._answered:
                self._count(node, "kernel", answered=answered)

    def note_connections(self, connected: Sequence[str], *, asked: float) -> list[str]:
        """Takes in which nodes are connected to srun. Returns those that were and are not any more, for no known
        reason."""
        for node in connected:
            self._connected[node] = asked
            self._count(node, "daemon", answered=True)
        return [node for node in self._connected if node not in connected and node not in self._ended]

    def note_daemons(self, answers: Mapping[str, bool]) -> None:
        """Takes in whether slurmd answers on nodes that are no longer connected to srun."""
        for node, answered in answers.items():
            self._count(node, "daemon", answered=answered)
            if answered:
                self._ended.add(node)

    def _count(self, node: str, what: str, *, answered: bool) -> None:
        self._silences[node, what] = 0 if answered else self._silences.get((node, what), 0) + 1

    def _probe(
        self, nodes: Sequence[str], *, port: int, outcomes: Sequence[int] | None = None
    ) -> dict[str, bool]:
        targets = [ProbeTarget(host=node, addresses=self._addresses[node], port=port) for node in nodes]
        if outcomes is None:
            return probe_hosts(targets, timeout_s=_TIMEOUT_S)
        return probe_hosts(targets, timeout_s=_TIMEOUT_S, answers=outcomes)

    def _connected_nodes(self) -> list[str]:
        if self._srun is None:
            return []
        try:
            connections = self._srun.net_connections(kind="tcp")
        except psutil.Error:  # srun has just ended
            return list(self._connected)
        peers = {
            connection.raddr.ip.removeprefix("::ffff:")
            for connection in connections
            if connection.status == psutil.CONN_ESTABLISHED and connection.raddr
        }
        return [node for node, addresses in self._addresses.items() if peers & {*addresses}]
