"""The work of a node's leader, the rank that copies information between the node's folder and the run directory.

The leader is the lowest rank of the node that still writes its file. It does no harm if two ranks act as leaders.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import final

from hpctrain.comm.watchdog.board.node_files import (
    NodeStatus,
    WatchFolders,
    alarm_path,
    announce_ending,
    call,
    call_path,
    calls_path,
    read_ending,
    read_local,
    read_nodes,
    status_of_node,
    time_of,
    write_node,
)
from hpctrain.comm.watchdog.board.rank_status import (
    Activity,
    ComparisonSchedule,
    Positions,
    SignatureMismatch,
    activities,
    find_mismatch,
    find_waiting,
)
from hpctrain.comm.watchdog.host_probe import HostReachability

_NODES_COMPARED = 32  # in addition to its own
_READING_MAY_TAKE_S = 2.0
_PROCESSES_EVERY_S = 0.5
_ASKED_EVERY_S = 1.0  # between two files of a node on which a rank is late


@final
class NodeLeader:
    """Copies information between the folder of this node and the run directory whenever `lead` is called.

    Every rank has such an object, so that any rank can take over from a leader that no longer writes its file.
    """

    def __init__(
        self,
        folders: WatchFolders,
        *,
        ranks: Collection[int],
        reach: HostReachability,
        timeout_s: float,
        since: float,
        interval_s: float,
        is_alarmed: Callable[[], bool],
        mismatch: Callable[[SignatureMismatch], None],
    ) -> None:
        """Creates the object; writes nothing yet.

        ranks: ranks of this node.
        since: start of this attempt, in seconds since 1970; older files are ignored.
        interval_s: seconds between two updates of the node's file.
        is_alarmed: function that returns True while an operation is late. Meanwhile the node's status also contains
        what the ranks' processes do.
        mismatch: function that is called if ranks of this node wait in an operation to which ranks have passed
        different arguments.
        """
        self._folders = folders
        self._shared, self._local = folders.shared, folders.local
        self._ranks = frozenset(ranks)
        self._reach = reach
        self._timeout_s = timeout_s
        self._since = since
        self._interval_s = interval_s
        self._is_alarmed = is_alarmed
        self._mismatch = mismatch
        self._activities: dict[int, Activity] = {}  # by process id
        self._looked: float | None = None
        self._is_asked_for = False  # other ranks wait for one of this node
        self._comparisons = ComparisonSchedule(timeout_s)
        self._alarm: float | None = None  # when it was raised, according to the file in the run directory
        self._published: float | None = None
        self._news: object = None  # what others are waiting for: the node's file is written when it changes

    def status(self) -> NodeStatus:
        """Returns the status of this node, read from its ranks' files."""
        positions, own = read_local(self._local), self._reach.own
        if self._is_alarmed():
            self._look_at_processes([found.pid for found in positions.values() if found.pid is not None])
            positions = {
                rank: replace(found, activity=self._activities.get(found.pid or 0))
                for rank, found in positions.items()
            }
        return status_of_node(
            positions, node=self._folders.node, host=self._reach.here, now=time.time(),
            probed_within_s=self._timeout_s,
            addresses=() if own is None else own.addresses, port=None if own is None else own.port,
        )  # fmt: skip

    def _look_at_processes(self, pids: Collection[int]) -> None:
        now = time.monotonic()
        if self._looked is None or now > self._looked + _PROCESSES_EVERY_S:
            self._activities, self._looked = activities(pids), now

    def publish(self, status: NodeStatus) -> None:
        """Writes the node's file. Raises OSError."""
        self._published = time.monotonic()
        write_node(status, shared=self._shared, rank=self._folders.rank)

    def lead(self, *, ends: bool) -> None:
        """Copies new information from the run directory to the node's folder, and writes the node's file if it is due.

        Copied are the announcement that the run ends, alarms (an operation is late), and requests that a rank prints
        its stacks. Raises OSError.

        ends: True if the ranks of this node already know that the run ends.
        """
        if not ends and (ending := read_ending(self._shared, since=self._since)) is not None:
            announce_ending(ending, directory=self._local)
        raised = time_of(alarm_path(self._shared), since=self._since)
        if raised != self._alarm:
            self._alarm = raised
            alarm_path(self._local).touch()
        is_alarmed = self._is_alarmed()
        if is_alarmed:
            self._carry_calls()
        status = self.status()
        self._compare(status)
        news = (status.reached, {rank for rank, found in status.positions.items() if found.leaving})
        # Ranks of other nodes wait for one of this node, and follow what it does.
        interval_s = (
            min(self._interval_s, _ASKED_EVERY_S) if is_alarmed and self._is_asked_for else self._interval_s
        )
        due = self._published is None or time.monotonic() >= self._published + interval_s
        if due or news != self._news:
            self._news = news
            self.publish(status)

    def _carry_calls(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(calls_path(self._shared)):
                if name.isdigit() and (rank := int(name)) in self._ranks:
                    path = call_path(self._shared, rank=rank)
                    if time_of(path, since=self._since) is not None:
                        call(self._local, rank=rank)
                        self._is_asked_for = True
                    path.unlink(missing_ok=True)

    def _compare(self, status: NodeStatus) -> None:
        """Checks that all ranks have passed equal arguments to an operation that takes long.

        Reads the files of some other nodes.

        status: contents of this node's file.
        """
        due = self._comparisons.due(status.positions.values())
        if not due:
            return
        self.publish(status)
        others = [node for node in range(self._folders.placement.num_nodes) if node != self._folders.node]
        found, _ = read_nodes(
            self._shared, nodes=random.sample(others, min(len(others), _NODES_COMPARED)), since=self._since,
            within_s=min(_READING_MAY_TAKE_S, self._timeout_s / 8),
        )  # fmt: skip
        known = {rank: position for other in (*found, status) for rank, position in other.positions.items()}
        wrong = find_mismatch(known, decided=[group for group, left in due.items() if left == 0])
        if wrong is None:
            return
        here = Positions(by_rank=read_local(self._local))  # are its ranks still in it?
        if find_waiting(here, members=wrong.ranks, group=wrong.group, sequence=wrong.sequence):
            self._mismatch(wrong)
