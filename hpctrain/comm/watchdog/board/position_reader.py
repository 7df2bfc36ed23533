"""What the ranks of all nodes are doing, from their nodes' files, and which of them an operation waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

from hpctrain.comm.watchdog.board.node_files import NodeStatus, WatchFolders, read_nodes
from hpctrain.comm.watchdog.board.rank_status import (
    Absence,
    Finding,
    Positions,
    RankPosition,
    find_absent,
    find_silent,
    find_stacks,
    find_waiting,
)
from hpctrain.comm.watchdog.network_partition import find_cut
from hpctrain.comm.watchdog.operation_state import Track


def join_positions(
    statuses: Iterable[NodeStatus],
    *,
    nodes: Sequence[int],
    unread: Sequence[int] = (),
    now: float,
    silent_after_s: float,
    probed_within_s: float,
) -> Positions:
    """Returns what `statuses` of `nodes` say at `now` (epoch).

    silent_after_s: a node without a file that recent is silent. probed_within_s: older findings do not count.
    """
    by_rank: dict[int, RankPosition] = {}
    silent: dict[int, float | None] = dict.fromkeys(set(nodes) - set(unread))
    reached: dict[str, dict[str, bool]] = {}
    for status in statuses:
        age_s = now - status.written
        if age_s <= probed_within_s:
            known = reached.setdefault(status.host, {})
            for other, answered in status.reached.items():
                known[other] = known.get(other, False) or answered
        if age_s > silent_after_s:
            silent[status.node] = age_s
            continue
        silent.pop(status.node, None)
        for rank, position in status.positions.items():
            # How long a rank has been silent is known by the clock of its node.
            by_rank[rank] = replace(position, written=now - (status.written - position.written))
    return Positions(by_rank=by_rank, silent_nodes=silent, unread_nodes=unread, reached=reached)


@final
class PositionReader:
    """Reads the nodes' files for one rank: one for each other node with a rank that is asked for."""

    def __init__(
        self,
        folders: WatchFolders,
        *,
        own_status: Callable[[], NodeStatus],
        since: float,
        timeout_s: float,
        rank_silent_s: float,
        node_silent_s: float,
    ) -> None:
        """own_status: returns the status of this node as of now. since (epoch): older files are ignored.

        rank_silent_s, node_silent_s: age of a file after which its rank or node is silent.
        """
        self._folders = folders
        self._own_status = own_status
        self._since = since
        self._timeout_s = timeout_s
        self._rank_silent_s = rank_silent_s
        self._node_silent_s = node_silent_s

    def read(self, ranks: Sequence[int], *, within_s: float) -> Positions:
        """Returns the positions of `ranks`, and of others on their nodes. within_s: time limit for all files."""
        nodes, own = self._folders.placement.nodes_of(ranks), self._folders.node
        others = [node for node in nodes if node != own]
        statuses, unread = read_nodes(
            self._folders.shared, nodes=others, since=self._since, within_s=within_s
        )
        if own in nodes:
            statuses.append(self._own_status())
        return join_positions(
            statuses, nodes=nodes, unread=unread, now=time.time(), silent_after_s=self._node_silent_s,
            probed_within_s=self._timeout_s,
        )  # fmt: skip

    def absent(self, track: Track, positions: Positions) -> list[Absence]:
        """Returns the other members of `track` that have not begun its operation."""
        return find_absent(
            positions,
            members=[rank for rank in track.members if rank != self._folders.rank],
            placement=self._folders.placement,
            group=track.group,
            sequence=track.sequence,
            now=time.time(),
            usual_silence_s=self._rank_silent_s,
            waited_s=track.waited_s(),
        )

    def find(
        self,
        track: Track | None,
        *,
        world: Sequence[int],
        here: str,
        reached: Mapping[str, bool],
        within_s: float,
    ) -> Finding:
        """Returns who has not begun the operation of `track`; if all have, the silent ranks outside the group.

        track: None if this rank is in no operation. world: all ranks. here, reached: this host, and which others
        answered this rank. within_s: time limit to read the files of all nodes.
        """
        positions = self.read(world, within_s=within_s)
        known = dict(positions.reached.get(here, {}))
        for host, answered in reached.items():
            known[host] = known.get(host, False) or answered
        cut = find_cut({**positions.reached, here: known}, here=here)
        unread = [self._folders.placement.node_names[node] for node in positions.unread_nodes]
        if track is None:
            return Finding(cut=cut, unread=unread)
        absent = self.absent(track, positions) or find_silent(
            positions,
            ranks=sorted(set(world) - set(track.members)),
            placement=self._folders.placement,
            now=time.time(),
            usual_silence_s=self._node_silent_s + self._timeout_s / 8,
            waited_s=track.waited_s(),
        )
        waiting = find_waiting(positions, members=track.members, group=track.group, sequence=track.sequence)
        stacks = find_stacks(positions, absent=absent, waiting=waiting)
        return Finding(cut=cut, absent=absent, waiting=waiting, unread=unread, stacks=stacks)
