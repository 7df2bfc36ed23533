"""The status board: files in which each rank states what it is doing (its position), for the other ranks to read.

Normally only the board's own thread accesses these files: if the filesystem hangs, that thread is blocked, but the
watcher's deadline still works. As long as a rank's operations start and end as often as before, the thread touches no
file. When no operation has started or ended for longer than usual, the thread starts to read files, and to write the
rank's position.

With N ranks on C nodes, the ranks use files of their own node only, and one rank of each node, its leader, uses the
run directory. C files are created at the start. While no progress is made, each leader makes two look-ups per second
(three during an alarm) and one rename every 1 to 10 s. In all these are 2 C look-ups, and C / 10 renames or more, per
second. The one rank that reports a hang reads C files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

from hpctrain.comm.watchdog.board.node_files import (
    Ending,
    LocalFolder,
    NodeStatus,
    WatchFolders,
    alarm_path,
    announce_from_node,
    call,
    call_path,
    create_exclusively,
    position_path,
    quietly,
    read_ending,
    read_nodes,
    reported_path,
    take_over_path,
    time_of,
    write_position,
)
from hpctrain.comm.watchdog.board.node_leader import NodeLeader
from hpctrain.comm.watchdog.board.rank_status import (
    COMPARE_AT_MOST_AFTER_S,
    Absence,
    EarlyLimits,
    GroupPosition,
    HangEvidence,
    IdleSince,
    Positions,
    RankPosition,
    find_absent,
    find_hung,
    find_silent,
    find_stacks,
    find_waiting,
)
from hpctrain.comm.watchdog.host_probe import HostReachability, find_cut
from hpctrain.comm.watchdog.operation_state import ProgressMonitor, Track
from hpctrain.comm.watchdog.timeout_report import print_with_stacks


def join_positions(
    statuses: Iterable[NodeStatus],
    *,
    nodes: Sequence[int],
    unread: Sequence[int] = (),
    now: float,
    silent_after_s: float,
    probed_within_s: float,
) -> Positions:
    """Combines the contents of the nodes' files into what each rank was doing at `now` (seconds since 1970).

    statuses: contents of the files that could be read.
    nodes: indices of the nodes whose files were requested.
    unread: indices of the nodes whose file could not be read.
    silent_after_s: age in seconds of a node's file above which the node counts as silent.
    probed_within_s: age in seconds of a node's file above which its probe results are ignored.
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
    """Reads, for one rank, the positions of other ranks (what they do now), from one file per other node."""

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
        """Creates the reader.

        own_status: function that returns the current status of this node.
        since: start of this attempt, in seconds since 1970; older files are ignored.
        timeout_s: time limit of an operation in seconds; probe results that are older than this are ignored.
        rank_silent_s, node_silent_s: age in seconds of its file above which a rank, or a node, counts as silent.
        """
        self._folders = folders
        self._own_status = own_status
        self._since = since
        self._timeout_s = timeout_s
        self._rank_silent_s = rank_silent_s
        self._node_silent_s = node_silent_s

    def read(self, ranks: Sequence[int], *, within_s: float) -> Positions:
        """Returns the positions (what ranks do now) of `ranks`, and of the other ranks on the same nodes.

        within_s: time limit for reading all files.
        """
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
        """Returns the other ranks that have not started the current operation of a communicator.

        track: this rank's state of that communicator.
        positions: what each rank is doing, from `read`.
        """
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
    ) -> HangEvidence:
        """Returns which ranks have not started the operation that this rank waits in, and which ranks wait in it.

        If all ranks of the communicator have started the operation, the ranks outside of the communicator that have
        written nothing for long are returned as absent instead.

        track: state of the communicator on which this rank has waited longest; None if this rank is in no operation.
        world: all ranks.
        here: name of this host.
        reached: for each other host, whether it answered this rank's probe.
        within_s: time limit for reading the files of all nodes.
        """
        positions = self.read(world, within_s=within_s)
        known = dict(positions.reached.get(here, {}))
        for host, answered in reached.items():
            known[host] = known.get(host, False) or answered
        cut = find_cut({**positions.reached, here: known}, here=here)
        unread = [self._folders.placement.node_names[node] for node in positions.unread_nodes]
        if track is None:
            return HangEvidence(cut=cut, unread=unread)
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
        return HangEvidence(cut=cut, absent=absent, waiting=waiting, unread=unread, stacks=stacks)


# The status board.


# Number of attempts to learn which hosts answer.
_LEARN_TRIES = 10
# A thread that wakes up later than planned by this much was suspended, or kept from running by a lock.
_AWAY_S = 1.0
# Up to this many ranks, each rank reports for itself. In a larger world only the announcing rank reports; ranks of this
# many nodes ask whether to report in its place, and at most this many ranks are asked for their stacks.
REPORTING_RANKS = 16
# Of a group with absent ranks, this many first members ask them for stacks, and the first member on this many nodes.
_CALLING_RANKS = 4
_FIRST_NODES_ANNOUNCE_S = 1.0  # time for the first nodes to announce the end, so that not all nodes do
# A rank that has not written its file for this many intervals is silent; then the next rank of its node leads.
_SILENT_AFTER_INTERVALS = 3
# Seconds that the ranks have to report after a mismatch was found.
_MISMATCH_GRACE_S = 2.5
_READING_MAY_TAKE_S = 2.0
# An alarm is over when operations begin and end as before, but not sooner.
_ALARM_LASTS_S = 5.0
_ONE_ALARM_S = 10.0  # within which the ranks that wait raise it


@final
class Board:
    """One rank's access to the status board. The constructor raises OSError if the folders cannot be used."""

    def __init__(
        self,
        folders: WatchFolders,
        *,
        hold: LocalFolder | None = None,
        timeout_s: float,
        since: float,
        tracks: Callable[[], Sequence[Track]],
        step: Callable[[], int | None],
        doing: Callable[[], str],
        section: Callable[[], str],
        stack: Callable[[], str],
        reach: HostReachability,
        probe_hosts: Callable[[], None],
        notice: Callable[[], None],
    ) -> None:
        """Writes this rank's file and starts the board's thread.

        The lowest rank of each node also writes the node's file.

        folders: folders of the board, which must exist.
        hold: this rank's hold on the folder of the node, if it has one already.
        timeout_s: time limit of an operation.
        since: start of this attempt, in seconds since 1970; older files are ignored.
        tracks: function that returns the state (`Track`) of each communicator, the world's first.
        step: function that returns the current step.
        doing: function that returns the label of the current activity.
        section: function that returns the name of the section of the run that this rank is in; "" for none.
        stack: function that returns this rank's short stack.
        reach: state of the probes of other hosts.
        probe_hosts: function that probes the other hosts.
        notice: function that is called when `ending` is set.
        """
        self.folders = folders
        self.rank = folders.rank
        self.ending: Ending | None = None
        self._local, self._shared = folders.local, folders.shared
        self._node_ranks = folders.placement.ranks_on(folders.node)
        self._timeout_s = timeout_s
        self._since = since
        self._tracks = tracks
        self._step = step
        self._doing = doing
        self._section = section
        self._stack = stack
        self._reach = reach
        self._probe_hosts = probe_hosts
        self._notice = notice
        self.interval_s = min(1.0, timeout_s / 8)
        self.alarmed: float | None = None
        self._silent_after_s = _SILENT_AFTER_INTERVALS * self.interval_s
        # Frequent enough for recent positions at the deadline, rare enough not to load the file system (1000 nodes).
        node_interval_s = max(self.interval_s, min(10.0, timeout_s / 20))
        self._leader = NodeLeader(
            folders, ranks=self._node_ranks, reach=reach, timeout_s=timeout_s, since=since,
            interval_s=node_interval_s, is_alarmed=self._is_alarmed,
            mismatch=lambda found: self._end_by_mismatch(found.text),
        )  # fmt: skip
        self._reader = PositionReader(
            folders, own_status=self._leader.status, since=since, timeout_s=timeout_s,
            rank_silent_s=self._silent_after_s, node_silent_s=3 * node_interval_s,
        )  # fmt: skip
        self._published: float | None = None
        self._shown: float | None = None  # when this rank last showed its stacks because others asked
        self._leaving = False
        self._left: set[int] = set()  # ranks known to be leaving
        self._tries_left = _LEARN_TRIES
        self._progress = ProgressMonitor(at_most_s=timeout_s / 8)
        self._watched_until = time.monotonic()
        self._looking_since: float | None = None
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._alarm: float | None = None
        self._hold = hold or LocalFolder(folders.local)
        self.publish()
        if self.rank == self._node_ranks[0]:
            self._leader.publish(self._leader.status())
        threading.Thread(target=self._run, name="hpctrain-board", daemon=True).start()

    def end(self) -> None:
        """Stops the thread and leaves the node's folder."""
        self._over.set()
        with self._writing:
            self._hold.release()

    # ---- this rank's file

    def publish(self) -> None:
        """Writes now what this rank does (its position) into the rank's file. Thread-safe."""
        with self._writing:
            if not self._over.is_set():
                self._publish()

    def _publish(self) -> None:
        self._published = time.monotonic()
        groups = {}
        for track in self._tracks():
            waiting_s = None if track.since is None else track.waited_s()
            groups[track.group] = GroupPosition(
                sequence=track.sequence,
                operation=track.operation,
                waiting_s=waiting_s,
                signature=track.signature,
                num_ranks=len(track.members),
            )
        position = RankPosition(
            rank=self.rank,
            host=self._reach.here,
            pid=os.getpid(),
            written=time.time(),
            step=self._step(),
            doing=self._doing(),
            groups=groups,
            reached=dict(self._reach.found),
            leaving=self._leaving,
            section=self._section(),
            stack=self._stack(),
        )
        write_position(position, local=self._local)

    def announce_exit(self) -> None:
        """Publishes that this rank is ready to exit: it has printed its report, or need not print a report."""
        self._leaving = True
        self.publish()

    # ---- the thread

    def _run(self) -> None:
        while True:
            pause_s, began = self._pause_s(), time.monotonic()
            if self._over.wait(pause_s):
                return
            if time.monotonic() > began + pause_s + _AWAY_S:
                # The timer without Python's lock may be ending this rank, unless this file is renewed.
                self._watched_until = time.monotonic() + 3 * self._silent_after_s
            # A full or missing disk must not end this thread; the deadline still holds.
            quietly(self._look)

    def _pause_s(self) -> float:
        return self.interval_s / (4 if self._is_alarmed() or self.ending is not None else 1)

    def _is_alarmed(self) -> bool:
        return self.alarmed is not None and time.monotonic() < self.alarmed + self._timeout_s

    def _is_busy_as_usual(self) -> bool:
        """Returns True while operations start and end about as often as before, and none takes long. Reads no file."""
        tracks = self._tracks()
        is_usual = self._progress.is_usual(map(Track.progress, tracks), now_s=time.monotonic())
        return is_usual and not any(track.waited_s() > COMPARE_AT_MOST_AFTER_S for track in tracks)

    def _look(self) -> None:
        if self._tries_left:
            self._learn()
        is_busy, now = self._is_busy_as_usual(), time.monotonic()
        if is_busy and self.alarmed is not None and now > self.alarmed + _ALARM_LASTS_S:
            self.alarmed = None  # the operation was only slow
        if is_busy and not self._is_alarmed() and now > self._watched_until:
            self._looking_since = None
            return
        if self._looking_since is None:
            self._looking_since = now
        if self._published is None or now >= self._published + self.interval_s:
            self.publish()
        if self._leads():
            quietly(lambda: self._leader.lead(ends=self.ending is not None))
        self._answer_call()
        seen = time_of(alarm_path(self._local))
        if seen != self._alarm:
            self._alarm = seen
            self._begin_alarm()
        if self.ending is None:
            self.ending = read_ending(self._local)
            if self.ending is not None:
                self._notice()

    def _leads(self) -> bool:
        """Returns True if this rank leads its node.

        It does if it is the node's lowest rank, or if no lower rank has written its file for some time.
        """
        if self.rank == self._node_ranks[0]:
            return True
        if self._looking_since is None or time.monotonic() < self._looking_since + self._silent_after_s:
            return False  # the others may just begin to write
        lower = self._node_ranks[: self._node_ranks.index(self.rank)]
        # Mostly the first one has written, so that the others need not be looked at.
        return not any(
            (written := time_of(position_path(self._local, rank=rank))) is not None
            and time.time() < written + self._silent_after_s
            for rank in lower
        )

    def _learn(self) -> None:
        """Finds out which other hosts answer probes, once the watcher knows the addresses of the other hosts."""
        if self._reach.others is None:
            return
        self._tries_left -= 1
        # A host that is busy may answer later; one behind a firewall never does.
        if self._reach.learn(timeout_s=min(2.0, self._timeout_s / 8)):
            self._tries_left = 0

    # ---- late operations

    def raise_alarm(self, track: Track) -> None:
        """Makes every rank probe the other hosts, and makes the ranks that hold up an operation print their stacks.

        track: state of the communicator of that operation. The ranks are those that have not started the operation.

        Of several ranks that call this, the first on each node raises the alarm on its node, and the first of all
        raises the alarm for all nodes. Ranks that call at the same moment may all do so.
        """
        for directory in (self._local, self._shared):
            raised = time_of(alarm_path(directory), since=self._since)
            if raised is not None and time.time() < raised + min(_ONE_ALARM_S, self._timeout_s / 4):
                break
            alarm_path(directory).touch()
        if not self.asks(track):
            return
        positions = self._reader.read(track.members, within_s=_READING_MAY_TAKE_S)
        absent = [rank for absence in self._reader.absent(track, positions) for rank in absence.ranks]
        for rank in absent[:REPORTING_RANKS]:
            call(self._local if rank in self._node_ranks else self._shared, rank=rank)

    def asks(self, track: Track) -> bool:
        """Returns True if this rank must examine whether the ranks that have not started an operation are hung.

        track: state of the communicator of that operation.

        The first four ranks of the communicator, and its first rank on each of its first four nodes, examine this.
        Several ranks do so, because some of them may be absent themselves.
        """
        placement = self.folders.placement
        if self.rank in track.members[:_CALLING_RANKS]:
            return True
        here = [rank for rank in track.members if placement.node_of_rank[rank] == self.folders.node]
        return (
            here[:1] == [self.rank]
            and self.folders.node in placement.nodes_of(track.members)[:_CALLING_RANKS]
        )

    def find_hung(self, track: Track, *, idle: IdleSince, limits: EarlyLimits) -> list[str]:
        """Returns one text per hung rank that holds up an operation, with the reason; see `rank_status.find_hung`.

        track: state of the communicator of that operation.
        idle: record of the ranks' CPU times, which this method updates.
        """
        positions = self._reader.read(track.members, within_s=_READING_MAY_TAKE_S)
        idle.update(positions)
        return find_hung(
            self._reader.absent(track, positions), now=positions, idle=idle, placement=self.folders.placement,
            answers=self._reach.found, group=track.group, waited_s=track.waited_s(), limits=limits,
        )  # fmt: skip

    def _begin_alarm(self) -> None:
        self.alarmed = time.monotonic()
        self._probe_hosts()

    def _answer_call(self) -> None:
        now = time.monotonic()
        if self._shown is not None and now < self._shown + self._timeout_s:
            return
        path = call_path(self._local, rank=self.rank)
        if path.exists():
            path.unlink(missing_ok=True)
            self._shown = now
            print_with_stacks(
                f"other ranks wait for rank {self.rank} on {self._reach.here}; its threads are at"
            )

    def find(self, track: Track | None, *, within_s: float) -> HangEvidence:
        """Returns which ranks hold up an operation, and which wait in it, from the files of all nodes.

        track: state of the communicator of that operation; None if this rank is in no operation.

        See `PositionReader.find`.
        """
        return self._reader.find(
            track, world=self._tracks()[0].members, here=self._reach.here, reached=self._reach.found,
            within_s=within_s,
        )  # fmt: skip

    # ---- the end

    def announce(self, reason: str, *, grace_s: float, at_once: bool = False) -> Ending:
        """Announces to all ranks that the run ends in `grace_s` seconds. Returns the announcement that was made first.

        Ranks of all nodes may call this at the same moment. Ranks of the first nodes announce the end at once. Ranks of
        other nodes first wait a moment for such an announcement, unless `at_once` is True.
        """
        now = time.time()
        after_s = 0.0 if at_once else self.announces_after_s()
        asked = Ending(
            rank=self.rank, host=self._reach.here, written=now, leave_at=now + grace_s, reason=reason
        )
        self.ending = announce_from_node(asked, shared=self._shared, local=self._local, after_s=after_s)
        self._notice()
        return self.ending

    def announces_after_s(self) -> float:
        """Returns for how many seconds this node waits for the first nodes to announce the end."""
        if self.folders.node < _CALLING_RANKS:
            return 0.0
        return min(_FIRST_NODES_ANNOUNCE_S, self._timeout_s / 16)

    def _end_by_mismatch(self, text: str) -> None:
        self.announce(text, grace_s=min(_MISMATCH_GRACE_S, self._timeout_s / 4), at_once=True)

    def another_reports(self) -> bool:
        """Returns True if another rank, which has announced the end, prints the report for this rank too."""
        return self.one_reports and self.ending is not None and self.ending.rank != self.rank

    @property
    def one_reports(self) -> bool:
        """True if there are so many ranks that only the announcing rank reports. Each report reads all nodes' files."""
        return len(self._tracks()[0].members) > REPORTING_RANKS

    def tell_reported(self) -> None:
        """Publishes that this rank has printed its report, if it reports for all ranks. Raises OSError."""
        if self.one_reports:
            reported_path(self._shared).touch()

    def take_over(self, ending: Ending) -> bool:
        """Returns True if this rank must report because the announcing rank has not reported.

        At most one rank of the run gets True. To spare the shared filesystem, one rank per node looks there, and only
        on the first 16 nodes and on the node of the announcing rank.
        """
        node = self.folders.node
        asks = node < REPORTING_RANKS or node == self.folders.placement.node_of_rank[ending.rank]
        return (
            asks
            and create_exclusively(take_over_path(self._local))
            and not reported_path(self._shared).exists()
            and create_exclusively(take_over_path(self._shared))
        )

    def all_leave(self) -> bool:
        """Returns True if every rank of the world is ready to exit."""
        left = [rank for rank in self._tracks()[0].members if rank not in self._left]
        positions = self._reader.read(left, within_s=_READING_MAY_TAKE_S)
        self._left |= {rank for rank, position in positions.by_rank.items() if position.leaving}
        return self._left.issuperset(left)
