"""The watcher: one thread that ends the run when a collective operation takes too long.

The thread polls the current operation of each of this rank's communicators. The ranks exchange their findings through
the files of a `Board`, never over the communication library, because the library itself may hang.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import final

from hpctrain.comm.collectives.activity import Section
from hpctrain.comm.watchdog.board.node_files import (
    Ending,
    LocalFolder,
    WatchFolders,
    forget_endings,
    make_local_folder,
    make_node_folders,
    quietly,
    within,
)
from hpctrain.comm.watchdog.board.rank_status import EarlyLimits, IdleSince
from hpctrain.comm.watchdog.board.short_stacks import own_stack
from hpctrain.comm.watchdog.board.status_board import Board
from hpctrain.comm.watchdog.gil_free_timer import GilFreeTimer, make_timer
from hpctrain.comm.watchdog.host_probe import HostReachability, ProbeTarget, find_cut, targets_of_others
from hpctrain.comm.watchdog.operation_state import InputWait, InputWaits, Track, Wait
from hpctrain.comm.watchdog.section_limits import LimitSettings, SectionLimits
from hpctrain.comm.watchdog.timeout_report import (
    describe_finding,
    describe_unknown,
    headline,
    print_with_stacks,
)
from hpctrain.errors import ExitCode

__all__ = ["Track", "Watcher"]

# Pause between two looks at a late operation: a share of the limit, so that a hang is found soon after it.
_PAUSE_SHARE = 1 / 32
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
# A thread that wakes up later than planned by this much was suspended, and so may the other ranks have been.
_SUSPENDED_AFTER_S = 5.0


def follow_late_operation(
    track: Track, *, board: Board, sections: SectionLimits, over: threading.Event
) -> str | None:
    """Observes an operation that is late, and returns the reason if the run must end before the operation's time limit.

    The function first raises the alarm, so that the absent ranks (those that have not started the operation) print
    their stacks. Then a few of the waiting ranks examine repeatedly whether an absent rank is hung; on all other ranks
    the function returns None at once. It also returns None when the operation or the watching has ended. Raises
    OSError.

    track: state of the communicator of that operation.
    over: event that is set when the watcher ends.
    """
    sequence = track.sequence
    board.raise_alarm(track)
    if not board.asks(track):
        return None
    idle = IdleSince()
    while track.sequence == sequence and track.since is not None and (early := sections.early) is not None:
        limits = EarlyLimits(
            here_s=early.seconds,
            everywhere_s=sections.early_everywhere_s,
            of=lambda name: sections.early_s_of(Section(name) if name else None),
        )
        hung = board.find_hung(track, idle=idle, limits=limits)
        if hung and track.sequence == sequence and track.since is not None:
            more = f" and {len(hung) - 4} more" if len(hung) > 4 else ""
            return f"{early.text}; {', '.join(hung[:4])}{more}"
        pause_s = min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * early.seconds))
        began = time.monotonic()
        if over.wait(pause_s):
            return None
        if time.monotonic() > began + pause_s + _SUSPENDED_AFTER_S:
            idle = IdleSince()
    return None


# The watcher.


_TELLING_SHARE = 0.6  # share of the ending for reports; then the ranks exit
_TAKING_OVER_SHARE = 0.25  # last part of that share: another rank reports if the announcing one has not
_TOGETHER_SHARE = 0.2  # share of the ending in which ranks exit together, once one has reported for all
_LATE_AFTER = 0.75  # share of the limit without the ending
# Time limits if files hang. Together with MPI_Abort they fit into the ending.
_ANNOUNCING_MAY_TAKE_S = 2.0
_REPORTING_MAY_TAKE_S = 3.0
_READING_SHARE = 0.5  # share of the time for the report in which the nodes' files are read
# Files of this run are newer than this rank's start, apart from clock differences and start times. A small tolerance is
# enough to exclude files of an earlier attempt, as Python, torch and the library have been loaded since then. A rank
# that is excluded wrongly is included again as soon as it renews its file.
_CLOCKS_DIFFER_S = 2.0
_EXIT_TIMER_AFTER_S = 0.5  # after the time limit, when the other ranks have reported
_EXIT_TIMERS_MAY_TAKE_S = 3.0


@final
class Watcher:
    """Watches the current operation of each communicator of one rank.

    timeout_s: time limit of an operation; when it is over, every rank has exited. Each rank therefore stops waiting
    earlier than that, by a quarter of this time or 5 s, whichever is less. `sections` may be configured with other
    limits for sections of the run.
    abort: function that ends all ranks; called at most once, from the watcher's thread.
    leave: function that ends this rank's process at once; None if ranks are threads, or if there is only one rank. If
    it is given, all ranks that have reported exit at the same time.
    is_process: True if this process runs no other rank, so that the process may be ended while Python is blocked.
    """

    def __init__(
        self,
        *,
        rank: int,
        timeout_s: float,
        abort: Callable[[int], None],
        leave: Callable[[int], None] | None = None,
        is_process: bool = False,
    ) -> None:
        self.rank = rank
        self.step: int | None = None
        self.doing = ""  # label of the current activity, for messages; "": none
        self._timeout_s = timeout_s
        self.sections = SectionLimits(LimitSettings(timeout_s=timeout_s, derive=False))
        self.inputs = InputWaits()
        self._interval_s = min(1.0, timeout_s / 8)
        self._main_thread = threading.get_ident()
        self._hung: tuple[Track, str] | None = None  # what ends the run before its limit, and why
        self._abort = abort
        self._leave = leave
        self._is_process = is_process or leave is not None
        self._num_lock_holders = 0
        self._since = time.time() - _CLOCKS_DIFFER_S
        self._host = socket.gethostname()
        self.tracks: list[Track] = []
        self._ended = threading.Event()
        self._noticed = threading.Event()
        self._reach: HostReachability | None = None
        self._board: Board | None = None
        self._hold: LocalFolder | None = None
        self._exit_timer: GilFreeTimer | None = None
        self._has_tried_timer = False
        self._is_ending = False
        self._setting = threading.Lock()
        self.inputs.making_changed = self._set_exit_timer
        self._look_s = min(2.0, timeout_s / 12)
        self._late: set[tuple[str, int]] = set()
        threading.Thread(target=self._watch, name="hpctrain-watcher", daemon=True).start()

    def prepare(self, folders: WatchFolders) -> None:
        """Prepares the folders of the ranks' files. Call it on every rank before any rank calls `publish_in`.

        On rank 0, it removes announcements that an earlier attempt of the run has left, and creates the folders of the
        nodes' files. On the lowest rank of each node, it creates the folder of the node. Raises OSError.
        """
        if self.rank == 0:
            forget_endings(folders.shared, since=self._since)
            make_node_folders(folders.shared, num_nodes=folders.placement.num_nodes)
        if self.rank == folders.placement.ranks_on(folders.node)[0]:
            self._hold = make_local_folder(folders.local)

    def publish_in(self, folders: WatchFolders) -> None:
        """Starts to write what this rank is doing into `folders`. Raises OSError if the folders cannot be used."""
        reach = self._reach = self._reach or HostReachability()
        before = self._board
        self._board = Board(
            folders,
            hold=self._hold,
            timeout_s=self._timeout_s,
            since=self._since,
            tracks=lambda: self.tracks,
            step=lambda: self.step,
            doing=lambda: self.inputs.text() or self.doing,
            section=lambda: self.sections.name,
            stack=lambda: own_stack(self._main_thread),
            reach=reach,
            probe_hosts=self._probe_hosts,
            notice=self._noticed.set,
        )
        self._hold = None
        if before is not None:
            before.end()
        with self._setting:  # it is created again, with the ranks' files
            if self._exit_timer is not None:
                self._exit_timer.stop()
            self._exit_timer, self._has_tried_timer = None, False
        self._set_exit_timer()

    def own_target(self) -> ProbeTarget | None:
        """Returns where other hosts can probe this host; None if no port could be reserved. Raises OSError."""
        self._reach = self._reach or HostReachability()
        return self._reach.own

    def know_hosts(self, targets: Iterable[ProbeTarget]) -> None:
        """Makes this rank probe which of the other hosts answer. Call it after `publish_in`.

        targets: targets on all hosts.
        """
        if self._reach is not None:
            self._reach.others = targets_of_others(targets, here=self._host)

    def lock_may_be_held(self) -> None:
        """Declares that from now on a library is in use that may hold Python's lock while the library waits.

        The watcher's thread cannot run while the lock is held; the timer of `hpctrain.comm.watchdog.gil_free_timer`
        then takes its place. Call `lock_is_free` once for each call of this method.
        """
        self._num_lock_holders += 1

    def lock_is_free(self) -> None:
        """Declares that the library of one `lock_may_be_held` call is no longer in use."""
        self._num_lock_holders -= 1
        self._set_exit_timer()

    def _make_exit_timer(self) -> None:
        self._has_tried_timer = True
        board = self._board
        self._exit_timer = make_timer(
            None if board is None else board.folders,
            rank=self.rank,
            wait_s=0.0 if board is None else 5 * board.interval_s,
            probe_s=self._look_s,
            since=self._since,
            exit_code=int(ExitCode.COMMUNICATION),
        )

    def track(self, *, group: str, members: tuple[int, ...]) -> Track:
        """Returns a new record of the current operation of one communicator, which is watched.

        group: name of the communicator, the same on all members.
        members: world ranks of the communicator.
        """
        track, others = Track(group, members), [one for one in self.tracks if not one.closed]
        self.tracks = [*others, track]  # a new list: the watcher may be iterating over the old one
        return track

    @contextlib.contextmanager
    def during(
        self,
        track: Track,
        operation: str,
        detail: str = "",
        *,
        signature: str | None = None,
        counted: bool = True,
    ) -> Iterator[None]:
        """Marks one operation as running in the `with` block; see `Track.during`.

        If a library is in use that may hold Python's lock while the library waits, this also sets the timer of
        `hpctrain.comm.watchdog.gil_free_timer`.
        """
        try:
            with track.during(operation, detail, signature=signature, counted=counted):
                if self._num_lock_holders:
                    self._set_exit_timer()
                yield
        finally:
            if self._num_lock_holders:
                self._set_exit_timer()

    @contextlib.contextmanager
    def doing_this(self, what: str) -> Iterator[None]:
        """Labels the operations in the `with` block in messages. The innermost label is shown."""
        before, self.doing = self.doing, what
        try:
            yield
        finally:
            self.doing = before

    def end(self) -> None:
        """Stops watching."""
        self._ended.set()
        self._noticed.set()
        self._set_exit_timer()
        if self._board is not None:
            self._board.end()
        if self._reach is not None:
            self._reach.close()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.is_set():
            pause_s = self._pause_s()
            self._noticed.wait(pause_s)
            if self._ended.is_set():
                return
            away_s = time.monotonic() - looked - pause_s
            looked = time.monotonic()
            if away_s > _SUSPENDED_AFTER_S:
                self._forgive(away_s)
            self._set_exit_timer()
            if self._board is not None and self._board.ending is not None:
                self._end_run(self._longest() or self.inputs.longest, ending=self._board.ending)
                return
            if self._hung is not None:
                self._end_run(self._hung[0], ending=None, hung=self._hung[1])
                return
            late_s = _LATE_AFTER * self.sections.first_limit_s
            for track in self.tracks:
                waited_s = track.waited_s()
                if waited_s > late_s:
                    self._be_late(track)
                if waited_s > self.sections.wait_limit_s:
                    self._end_run(track, ending=None)
                    return
            if late_input := self.inputs.late(self.tracks, limit_s=self.sections.wait_limit_s):
                self._end_run(late_input, ending=None)
                return

    def _pause_s(self) -> float:
        """Returns the seconds until the next poll: the interval, or less if a deadline is nearer."""
        limit_s = self.sections.wait_limit_s
        nearest_s = min((limit_s - track.waited_s() for track in self.tracks), default=limit_s)
        nearest_s = min(nearest_s, limit_s - self.inputs.longest_s)
        return max(0.01, min(self._interval_s, nearest_s + 0.005))

    def _forgive(self, seconds: float) -> None:
        """Subtracts `seconds`, in which this process was suspended (`scontrol suspend`), from the current waits."""
        for track in self.tracks:
            if track.since is not None:
                track.since += seconds
        self.inputs.forgive(seconds)

    def _set_exit_timer(self) -> None:
        """Postpones the timer that ends this rank when this thread cannot run because other code holds Python's lock.

        The timer is armed only during an operation of a library that may hold the lock, and while this process produces
        input. In other code, such as a file write, the lock may legitimately be held for long.
        """
        if not self._is_process:
            return
        limit_s = self.sections.wait_limit_s
        with self._setting:  # the communicating threads, and those that make input, do this too
            making = self.inputs.made
            left_s = [limit_s - self.inputs.longest_s] if making else []
            if self._num_lock_holders and self._board is not None and self._longest() is not None:
                left_s.append(limit_s - max(track.waited_s() for track in self.tracks))
            if left_s and not self._is_ending and not self._ended.is_set():
                if not self._has_tried_timer:
                    self._make_exit_timer()
                if self._exit_timer is not None:
                    self._exit_timer.set(max(0.0, min(left_s)) + _EXIT_TIMER_AFTER_S, note=making)
            elif self._exit_timer is not None:
                self._exit_timer.stop()

    def _longest(self) -> Track | None:
        waiting = [track for track in self.tracks if track.since is not None]
        return max(waiting, key=Track.waited_s, default=None)

    # ---- late

    def _be_late(self, track: Track) -> None:
        """Handles an operation that is late, once per operation.

        It requests the stacks of the ranks that have not started the operation, probes hosts, and examines which rank
        is hung.

        track: state of the communicator of that operation.
        """
        key = (track.group, track.sequence)
        board = self._board
        if key in self._late or board is None:
            return
        self._late = {*list(self._late)[-8:], key}
        self._probe_hosts()

        def follow() -> None:
            hung = follow_late_operation(track, board=board, sections=self.sections, over=self._ended)
            if hung is not None:
                self._hung = track, hung
                self._noticed.set()

        threading.Thread(target=quietly, args=(follow,), name="hpctrain-late", daemon=True).start()

    def _probe_hosts(self) -> None:
        """Probes the other hosts in a separate thread, and publishes the result in this rank's file."""
        board = self._board
        if self._reach is not None and board is not None:
            self._reach.probe_soon(
                timeout_s=self._look_s, at_most_every_s=min(10.0, self._timeout_s / 4), then=board.publish
            )

    # ---- the end

    def _end_run(self, track: Wait | None, *, ending: Ending | None, hung: str = "") -> None:
        board, code = self._board, int(ExitCode.COMMUNICATION)
        self._is_ending = True
        self._set_exit_timer()
        if board is not None and ending is None and track is not None:
            reason = f"it has waited {track.waited_s():.1f} s for {track.describe()}"
            reason += (f" ({self.doing})" if self.doing else "") + (f"; {hung}" if hung else "")
            limit_s = board.announces_after_s() + min(_ANNOUNCING_MAY_TAKE_S, self._least_s())
            grace_s = _TELLING_SHARE * self.sections.ending_s
            ending = within(limit_s, lambda: board.announce(reason, grace_s=grace_s)) or board.ending
        if board is None or ending is None:  # without an announcement the files hang
            self._tell_report(self._report_alone(), track=track, ending=None)
        elif not board.another_reports():
            self._report(board, track=track, ending=ending, hung=hung)
        elif self._takes_over(board, ending):
            self._report(board, track=track, ending=ending)
            ending = replace(ending, rank=self.rank)  # also ends those that do not exit
        has_left = (
            board is not None and ending is not None and self._leave_together(board, ending=ending, code=code)
        )
        self.end()
        if has_left:
            return
        with contextlib.suppress(Exception):  # `abort` of threads raises in this thread, which ends here
            self._abort(code)

    def _least_s(self) -> float:
        return max(1.0, self.sections.ending_s)

    def _takes_over(self, board: Board, ending: Ending) -> bool:
        """Waits until the rank that has announced the end should have reported.

        Returns True if it has not reported, and this rank must report in its place.
        """
        within(1.0, board.announce_exit)  # so that the announcing rank does not wait for this one
        left_s = min(ending.leave_at - time.time(), self.sections.ending_s)
        time.sleep(max(0.0, left_s - _TAKING_OVER_SHARE * _TELLING_SHARE * self.sections.ending_s))
        return bool(within(1.0, lambda: board.take_over(ending)))

    def _tell_report(self, report: str, *, track: Wait | None, ending: Ending | None, hung: str = "") -> None:
        limits = self.sections
        head = headline(
            track, ending=ending, rank=self.rank, host=self._host, step=self.step, doing=self.doing,
            timeout_s=limits.limit_s, ending_s=self.sections.ending_s, hung=hung,
            section=limits.now if limits.now in limits.settings.configured else None,
        )  # fmt: skip
        report = track.advice if isinstance(track, InputWait) else report
        print_with_stacks(f"{head}\n{report}\nthis rank's threads are at")

    def _leave_together(self, board: Board, *, ending: Ending, code: int) -> bool:
        """Waits until all ranks have reported, then exits with them. Returns False if this rank must end the others."""
        began, num_nodes = time.monotonic(), board.folders.placement.num_nodes
        within(1.0, board.announce_exit)
        until = time.monotonic() + max(0.0, min(ending.leave_at - time.time(), self.sections.ending_s + 1.0))
        all_leave = ending.rank != self.rank  # only the announcing rank ends those that do not exit
        if not all_leave and self._num_lock_holders and self._exit_timer is not None:
            until = max(until, began + _EXIT_TIMERS_MAY_TAKE_S)
        elif not all_leave and board.one_reports:
            until = min(until, began + _TOGETHER_SHARE * self.sections.ending_s)
        while time.monotonic() < until:
            if not all_leave:
                all_leave = bool(within(1.0, board.all_leave))
                if all_leave:
                    until = min(until, time.monotonic() + max(0.0, ending.leave_at - time.time()))
            # Each look reads a file of every node.
            pause_s = max(0.05, num_nodes / 1000)
            time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
        if all_leave and self._leave is not None:
            board.end()
            self._leave(code)
            return True
        # If ranks are threads, the announcing rank ends them all.
        return self._leave is None and ending.rank != self.rank

    def _report(self, board: Board, *, track: Wait | None, ending: Ending, hung: str = "") -> None:
        limit_s = min(_REPORTING_MAY_TAKE_S, self._least_s())
        report = within(limit_s, lambda: self._find(board, track, within_s=_READING_SHARE * limit_s))
        self._tell_report(report or self._report_alone(), track=track, ending=ending, hung=hung)
        within(1.0, board.tell_reported)

    def _find(self, board: Board, track: Wait | None, *, within_s: float) -> str:
        # Another rank may announce the end while this one still probes hosts: wait for the result.
        if self._reach is not None:
            self._reach.await_probe(within_s=self._look_s)
        found = board.find(track if isinstance(track, Track) else None, within_s=within_s)
        asked = len(self._reach.found) if self._reach is not None else 0
        return describe_finding(found, waits=track is not None, num_asked=asked)

    def _report_alone(self) -> str:
        """Returns a report that does not use the board's files."""
        cut = [] if self._reach is None else find_cut({self._host: self._reach.found}, here=self._host)
        return describe_unknown(cut, directory=None if self._board is None else self._board.folders.shared)
