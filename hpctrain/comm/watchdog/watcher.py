"""The watcher: one thread that ends the run when a collective operation takes too long.

It polls the current operation of each of this rank's communicators. The ranks exchange what they find through the
files of a `Board`, never over the communication library, since that may be what hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar, final

from hpctrain.comm.watchdog.gil_free_timer import GilFreeTimer, make_timer
from hpctrain.comm.watchdog.host_probe import HostReachability, ProbeTarget, targets_of_others
from hpctrain.comm.watchdog.network_partition import find_cut
from hpctrain.comm.watchdog.operation_state import Track
from hpctrain.comm.watchdog.rank_status import Ending
from hpctrain.comm.watchdog.status_board import Board
from hpctrain.comm.watchdog.timeout_report import describe_finding, describe_unknown, headline
from hpctrain.errors import ExitCode

__all__ = ["Track", "Watcher"]

T = TypeVar("T")

# A watcher that wakes up later than planned by this much was suspended together with its process.
_SUSPENDED_AFTER_S = 5.0
# The last part of the limit, in which the ranks report and exit, so that all have ended when it is over.
_ENDING_SHARE = 0.25
_ENDING_AT_MOST_S = 5.0
_TELLING_SHARE = 0.6  # share of the ending for reports; then the ranks exit
_LATE_AFTER = 0.75  # share of `_wait_limit_s`, which is the limit without the ending
# Time limits if files hang. Together with MPI_Abort they fit into the ending.
_ANNOUNCING_MAY_TAKE_S = 2.0
_REPORTING_MAY_TAKE_S = 3.0
# Files of this run are newer than this rank's start, apart from clock differences and start times. A small tolerance is
# enough to exclude files of an earlier attempt, as Python, torch and the library have been loaded since then. A rank
# that is excluded wrongly is included again as soon as it renews its file.
_CLOCKS_DIFFER_S = 2.0
# Delay of the timer after the time limit, when the other ranks have reported.
_EXIT_TIMER_AFTER_S = 0.5
_EXIT_TIMERS_MAY_TAKE_S = 3.0


@final
class Watcher:
    """Watches every `Track` of one rank.

    timeout_s: when an operation has taken that long, every rank has exited. Each therefore stops waiting a quarter of
    that time earlier, at most 5 s.
    abort: ends all ranks; called at most once, from the watcher's thread. leave: ends this rank's process at once; None
    if ranks are threads. With it, all ranks that have reported exit at the same time.
    directory: see `publish_in`.
    """

    def __init__(
        self,
        *,
        rank: int,
        timeout_s: float,
        abort: Callable[[int], None],
        leave: Callable[[int], None] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.rank = rank
        self.step: int | None = None
        self.doing = ""  # label of the current activity, for messages; "": none
        self._timeout_s = timeout_s
        self._interval_s = min(1.0, timeout_s / 8)
        self._ending_s = min(_ENDING_AT_MOST_S, _ENDING_SHARE * timeout_s)
        self._wait_limit_s = timeout_s - self._ending_s
        self._abort = abort
        self._leave = leave
        self._num_lock_holders = 0
        self._since = time.time() - _CLOCKS_DIFFER_S
        self._host = socket.gethostname()
        self._tracks: list[Track] = []
        self._ended = threading.Event()
        self._noticed = threading.Event()
        self._reach: HostReachability | None = None
        self._board: Board | None = None
        self._exit_timer: GilFreeTimer | None = None
        self._setting = threading.Lock()
        self._looking = threading.Lock()
        self._looked: float | None = None
        self._look_s = min(2.0, timeout_s / 12)
        self._late: set[tuple[str, int]] = set()
        if directory is not None:
            self.publish_in(directory)
        threading.Thread(target=self._watch, name="hpctrain-watcher", daemon=True).start()

    def publish_in(self, directory: Path) -> None:
        """From now on writes this rank's position to the existing `directory`. Raises OSError if it is not writable."""
        if self._reach is None:
            self._reach = HostReachability()
        before = self._board
        self._board = Board(
            directory,
            rank=self.rank,
            timeout_s=self._timeout_s,
            since=self._since,
            tracks=lambda: self._tracks,
            step=lambda: self.step,
            doing=lambda: self.doing,
            reach=self._reach,
            show=self._show,
            probe_hosts=self._probe_hosts,
            notice=self._noticed.set,
        )
        if before is not None:
            before.end()
        self._prepare_exit_timer()

    @property
    def own_target(self) -> ProbeTarget | None:
        """Where other hosts can probe this one; None before `publish_in`, or if no port could be reserved."""
        return None if self._reach is None else self._reach.own

    def know_hosts(self, targets: Iterable[ProbeTarget]) -> None:
        """Has this rank learn which of the other hosts answer. targets: of all hosts. Call it after `publish_in`."""
        if self._reach is not None:
            self._reach.others = targets_of_others(targets, here=self._host)

    def lock_may_be_held(self) -> None:
        """Marks the start of use of a library that may wait with Python's lock held, which would block this thread.

        Prepares the timer of `hpctrain.comm.watchdog.gil_free_timer`. Call `lock_is_free` once for each call.
        """
        self._num_lock_holders += 1
        self._prepare_exit_timer()

    def lock_is_free(self) -> None:
        """Marks the end of one such use."""
        self._num_lock_holders -= 1
        if self._num_lock_holders == 0 and self._exit_timer is not None:
            with self._setting:
                self._exit_timer.stop()

    def _prepare_exit_timer(self) -> None:
        """Makes the timer if it can be needed and the folder of the ranks' files is known."""
        needed = self._leave is not None and self._num_lock_holders > 0 and self._exit_timer is None
        if needed and self._board is not None and self._tracks:
            self._exit_timer = make_timer(
                directory=self._board.directory.resolve(),
                rank=self.rank,
                num_ranks=len(self._tracks[0].members),
                wait_s=self._board.publish_s + 2 * self._interval_s,
                probe_s=self._look_s,
                since=self._since,
                exit_code=int(ExitCode.COMMUNICATION),
            )

    def track(self, *, group: str, members: tuple[int, ...]) -> Track:
        """Starts watching a communicator. group: its name, the same on all members."""
        track = Track(group, members)
        self._tracks = [*self._tracks, track]  # a new list: the watcher may be iterating over the old one
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
        """`track.during`, for an operation that may wait with Python's lock held."""
        try:
            with track.during(operation, detail, signature=signature, counted=counted):
                self._set_exit_timer()
                yield
        finally:
            self._set_exit_timer()

    @contextlib.contextmanager
    def doing_this(self, what: str) -> Iterator[None]:
        """Labels the operations in the `with` block, for the messages. The innermost label is used."""
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
                self._end_run(self._longest(), ending=self._board.ending)
                return
            for track in self._tracks:
                waited_s = track.waited_s()
                if waited_s > _LATE_AFTER * self._wait_limit_s:
                    self._be_late(track)
                if waited_s > self._wait_limit_s:
                    self._end_run(track, ending=None)
                    return

    def _pause_s(self) -> float:
        """Returns the seconds until the next poll: at most the interval, less if a deadline is nearer."""
        nearest_s = min(
            (self._wait_limit_s - track.waited_s() for track in self._tracks), default=self._wait_limit_s
        )
        return max(0.01, min(self._interval_s, nearest_s + 0.005))

    def _forgive(self, seconds: float) -> None:
        """Excludes time in which this process was suspended (`scontrol suspend`) from the waits."""
        for track in self._tracks:
            if track.since is not None:
                track.since += seconds

    def _set_exit_timer(self) -> None:
        """Postpones the timer that acts if this thread can no longer run because the library holds Python's lock.

        Armed only during an operation: elsewhere the lock may be held for long legitimately, by a file write.
        """
        if self._exit_timer is None or self._num_lock_holders == 0:
            return
        with self._setting:  # the communicating threads do this too
            if self._ended.is_set() or self._longest() is None:
                self._exit_timer.stop()
            else:
                waited_s = max(track.waited_s() for track in self._tracks)
                self._exit_timer.set(max(0.0, self._wait_limit_s - waited_s) + _EXIT_TIMER_AFTER_S)

    def _longest(self) -> Track | None:
        waiting = [track for track in self._tracks if track.since is not None]
        return max(waiting, key=Track.waited_s, default=None)

    # ---- late

    def _be_late(self, track: Track) -> None:
        """Once per late operation: requests stacks of the absent ranks and probes the other hosts."""
        key = (track.group, track.sequence)
        board = self._board
        if key in self._late or board is None:
            return
        self._late = {*list(self._late)[-8:], key}
        self._probe_hosts()

        def tell() -> None:
            board.raise_alarm()
            board.call_absent(track)

        threading.Thread(target=_quietly, args=(tell,), name="hpctrain-late", daemon=True).start()

    def _probe_hosts(self) -> None:
        """Probes the other hosts in a separate thread and publishes the result."""
        reach = self._reach
        if reach is None or not reach.targets or not self._looking.acquire(blocking=False):
            return
        if self._looked is not None and time.monotonic() < self._looked + self._timeout_s / 4:
            self._looking.release()  # probed recently: the rank that raised an alarm sees it too
            return

        def look() -> None:
            try:
                reach.probe(timeout_s=self._look_s)
                self._looked = time.monotonic()
            finally:
                self._looking.release()
            if self._board is not None:
                self._board.publish()

        threading.Thread(target=_quietly, args=(look,), name="hpctrain-reach", daemon=True).start()

    # ---- the end

    def _end_run(self, track: Track | None, *, ending: Ending | None) -> None:
        board, code = self._board, int(ExitCode.COMMUNICATION)
        if self._exit_timer is not None:
            with self._setting:
                self._exit_timer.stop()
        report = None
        if board is not None:
            least_s = max(1.0, self._ending_s)
            if ending is None and track is not None:
                reason = f"it has waited {track.waited_s():.1f} s for {track.describe()}"
                reason += f" ({self.doing})" if self.doing else ""
                limit_s, grace_s = min(_ANNOUNCING_MAY_TAKE_S, least_s), _TELLING_SHARE * self._ending_s
                ending = _within(limit_s, lambda: board.announce(reason, grace_s=grace_s))
            if ending is not None:  # otherwise the files hang: do not wait for them again
                limit_s = min(_REPORTING_MAY_TAKE_S, least_s)
                report = _within(limit_s, lambda: self._report(board, track))
        if report is None:
            report = self._report_alone()
        head = headline(
            track,
            ending=ending,
            rank=self.rank,
            host=self._host,
            step=self.step,
            doing=self.doing,
            timeout_s=self._timeout_s,
            ending_s=self._ending_s,
        )
        self._show(f"{head}\n{report}\nthis rank's threads are at")
        if board is not None and ending is not None and self._leave_together(board, ending=ending, code=code):
            return
        with contextlib.suppress(Exception):  # `abort` of threads raises in this thread, which ends here
            self._abort(code)

    def _leave_together(self, board: Board, *, ending: Ending, code: int) -> bool:
        """Waits until all ranks have reported, then exits with them. Returns False if this rank must end the others."""
        began, num_ranks = time.monotonic(), len(self._tracks[0].members)
        _within(1.0, board.leave)
        until = time.monotonic() + max(0.0, min(ending.leave_at - time.time(), self._ending_s + 1.0))
        all_leave = ending.rank != self.rank  # only the announcing rank ends those that do not exit
        if not all_leave and self._exit_timer is not None:
            until = max(until, began + _EXIT_TIMERS_MAY_TAKE_S)
        while time.monotonic() < until:
            if not all_leave:
                all_leave = bool(_within(1.0, board.all_leave))
                if all_leave:
                    until = min(until, time.monotonic() + max(0.0, ending.leave_at - time.time()))
            # Each look reads a file of every rank.
            pause_s = max(0.05, num_ranks / 1000)
            time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
        if all_leave and self._leave is not None:
            self._leave(code)
            return True
        # If ranks are threads, the announcing rank ends them all.
        return self._leave is None and ending.rank != self.rank

    def _report(self, board: Board, track: Track | None) -> str:
        # Another rank may announce the end while this one still probes hosts: wait for the result.
        if self._looking.acquire(timeout=self._look_s):
            self._looking.release()
        lines = board.cut()
        if not board.reports_absences():
            return "\n".join([*lines, "the rank that ends the run names those that did not come"])
        absent = [] if track is None else board.absent(track)
        asked = len(self._reach.found) if self._reach is not None else 0
        return describe_finding(lines, absent, waits=track is not None, num_asked=asked)

    def _report_alone(self) -> str:
        """Returns a report without the board's files."""
        cut = [] if self._reach is None else find_cut({self._host: self._reach.found}, here=self._host)
        return describe_unknown(cut, directory=None if self._board is None else self._board.directory)

    def _show(self, message: str) -> None:
        stream = sys.__stderr__
        if stream is None:
            return
        # A single write, as the ranks share a terminal.
        stream.write(f"hpctrain: {message}\n")
        stream.flush()
        with contextlib.suppress(OSError, ValueError):  # a stream that is no file
            faulthandler.dump_traceback(file=stream, all_threads=True)


def _quietly(function: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        function()


def _within(seconds: float, function: Callable[[], T]) -> T | None:
    """Runs `function` in another thread and returns its result; None if it raises OSError or takes longer."""
    found: list[T] = []
    thread = threading.Thread(
        target=_quietly, args=(lambda: found.append(function()),), name="hpctrain-files", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def exit_now(code: int) -> None:
    """Ends this process at once. Unwritten messages of other threads are lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
