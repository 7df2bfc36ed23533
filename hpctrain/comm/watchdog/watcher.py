"""The watcher: one thread that ends the run when a collective operation takes too long.

It looks at what this rank's communicators say they are doing. What the ranks tell each other goes through the
files of a `Board`. It never communicates over the library that it watches: that may be what hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, final

from hpctrain.comm.watchdog.gil_free_timer import LastWord, wind_up
from hpctrain.comm.watchdog.host_probe import HostReachability
from hpctrain.comm.watchdog.network_partition import find_cut
from hpctrain.comm.watchdog.operation_state import Track
from hpctrain.comm.watchdog.rank_status import Ending
from hpctrain.comm.watchdog.status_board import Board
from hpctrain.comm.watchdog.timeout_report import describe_finding, describe_unknown, headline
from hpctrain.errors import ExitCode

__all__ = ["Track", "Watcher"]

T = TypeVar("T")

# A watcher that comes so much later than it wanted was stopped together with its process.
_SUSPENDED_AFTER_S = 5.0
# The last part of the limit: the ranks tell what they found and leave, so that all have ended when it is over.
_ENDING_SHARE = 0.25
_ENDING_AT_MOST_S = 5.0
_TELLING_SHARE = 0.6  # of the ending; then they leave
_LATE_AFTER = 0.75  # of the patience, which is the limit without that part
# All of it within the ending, should files hang, and MPI_Abort then.
_ANNOUNCING_MAY_TAKE_S = 2.0
_REPORTING_MAY_TAKE_S = 3.0
# What ranks of this run have written is younger than this rank's start, but for differing clocks and slow starts.
# A little, since no earlier attempt ended so shortly before: Python, torch and the library were started since.
# Who is left out wrongly is read again as soon as it renews its file.
_CLOCKS_DIFFER_S = 2.0
# Behind the patience, when the other ranks have said what they found.
_LAST_WORD_AFTER_S = 0.5
_LAST_WORDS_MAY_TAKE_S = 3.0


@final
class Watcher:
    """Watches every `Track` of one rank.

    timeout_s: when an operation has taken that long, every rank has ended. So each gives up a quarter of it earlier, at
    most 5 s.
    abort: ends all ranks; called at most once, from the watcher's thread. leave: ends this rank at once,
    where ranks are processes; then all that have told what they know leave together.
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
        self.doing = ""  # what the operations belong to; "" when nothing was said
        self._timeout_s = timeout_s
        self._interval_s = min(1.0, timeout_s / 8)
        self._ending_s = min(_ENDING_AT_MOST_S, _ENDING_SHARE * timeout_s)
        self._patience_s = timeout_s - self._ending_s
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
        self._last_word: LastWord | None = None
        self._winding = threading.Lock()
        self._looking = threading.Lock()
        self._looked: float | None = None
        self._look_s = min(2.0, timeout_s / 12)
        self._late: set[tuple[str, int]] = set()
        if directory is not None:
            self.publish_in(directory)
        threading.Thread(target=self._watch, name="hpctrain-watcher", daemon=True).start()

    def publish_in(self, directory: Path) -> None:
        """From now on leave this rank's position in `directory`, which is there. Raises OSError."""
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
            look_around=self._look_around,
            notice=self._noticed.set,
        )
        if before is not None:
            before.end()
        self._prepare_last_word()

    def lock_may_be_held(self) -> None:
        """From now on a library is in use that may wait with Python's lock held, so that this thread does not run.

        See `hpctrain.comm.watchdog.gil_free_timer`. Once for each use; each ends with `lock_is_free`.
        """
        self._num_lock_holders += 1
        self._prepare_last_word()

    def lock_is_free(self) -> None:
        """One such use has ended."""
        self._num_lock_holders -= 1
        if self._num_lock_holders == 0 and self._last_word is not None:
            with self._winding:
                self._last_word.stop()

    def _prepare_last_word(self) -> None:
        """Make the last word where one can be needed, and a directory says where the ranks' files are."""
        needed = self._leave is not None and self._num_lock_holders > 0 and self._last_word is None
        if needed and self._board is not None and self._tracks:
            self._last_word = wind_up(
                directory=self._board.directory.resolve(),
                rank=self.rank,
                num_ranks=len(self._tracks[0].members),
                patience_s=self._board.publish_s + 2 * self._interval_s,
                look_s=self._look_s,
                since=self._since,
                exit_code=int(ExitCode.COMMUNICATION),
            )

    def track(self, *, group: str, members: tuple[int, ...]) -> Track:
        """Begin to watch a communicator. `group`: a name that all its members give it."""
        track = Track(group, members)
        self._tracks = [*self._tracks, track]  # a new list: the watcher may be walking over the old one
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
                self._wind_last_word()
                yield
        finally:
            self._wind_last_word()

    @contextlib.contextmanager
    def doing_this(self, what: str) -> Iterator[None]:
        """What the operations inside belong to, for the messages. The innermost counts."""
        before, self.doing = self.doing, what
        try:
            yield
        finally:
            self.doing = before

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._noticed.set()
        self._wind_last_word()
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
            self._wind_last_word()
            if self._board is not None and self._board.ending is not None:
                self._end_run(self._longest(), ending=self._board.ending)
                return
            for track in self._tracks:
                waited_s = track.waited_s()
                if waited_s > _LATE_AFTER * self._patience_s:
                    self._be_late(track)
                if waited_s > self._patience_s:
                    self._end_run(track, ending=None)
                    return

    def _pause_s(self) -> float:
        """Until the next look, which comes when an operation is late, or the patience over, if that is nearer."""
        nearest_s = min(
            (self._patience_s - track.waited_s() for track in self._tracks), default=self._patience_s
        )
        return max(0.01, min(self._interval_s, nearest_s + 0.005))

    def _forgive(self, seconds: float) -> None:
        """This whole process stood still (`scontrol suspend`): that is no wait for another rank."""
        for track in self._tracks:
            if track.since is not None:
                track.since += seconds

    def _wind_last_word(self) -> None:
        """For the case that this thread does not come to run any more, because the library holds Python's lock.

        Only in an operation: elsewhere the lock may be held for long without harm, by a file that is written.
        """
        if self._last_word is None or self._num_lock_holders == 0:
            return
        with self._winding:  # the communicating threads wind it too
            if self._ended.is_set() or self._longest() is None:
                self._last_word.stop()
            else:
                waited_s = max(track.waited_s() for track in self._tracks)
                self._last_word.wind(max(0.0, self._patience_s - waited_s) + _LAST_WORD_AFTER_S)

    def _longest(self) -> Track | None:
        waiting = [track for track in self._tracks if track.since is not None]
        return max(waiting, key=Track.waited_s, default=None)

    # ---- late

    def _be_late(self, track: Track) -> None:
        """Once for each operation that is late: ask who is missing, and which hosts answer."""
        key = (track.group, track.sequence)
        board = self._board
        if key in self._late or board is None:
            return
        self._late = {*list(self._late)[-8:], key}
        self._look_around()

        def tell() -> None:
            board.raise_alarm()
            board.call_absent(track)

        threading.Thread(target=_quietly, args=(tell,), name="hpctrain-late", daemon=True).start()

    def _look_around(self) -> None:
        """Find out which hosts answer, in a thread of its own, and publish it."""
        reach = self._reach
        if reach is None or not reach.doors or not self._looking.acquire(blocking=False):
            return
        if self._looked is not None and time.monotonic() < self._looked + self._timeout_s / 4:
            self._looking.release()  # a moment ago: an alarm comes back to the rank that raised it
            return

        def look() -> None:
            try:
                reach.look(timeout_s=self._look_s)
                self._looked = time.monotonic()
            finally:
                self._looking.release()
            if self._board is not None:
                self._board.publish()

        threading.Thread(target=_quietly, args=(look,), name="hpctrain-reach", daemon=True).start()

    # ---- the end

    def _end_run(self, track: Track | None, *, ending: Ending | None) -> None:
        board, code = self._board, int(ExitCode.COMMUNICATION)
        if self._last_word is not None:
            with self._winding:
                self._last_word.stop()
        told = None
        if board is not None:
            least_s = max(1.0, self._ending_s)
            if ending is None and track is not None:
                reason = f"it has waited {track.waited_s():.1f} s for {track.describe()}"
                reason += f" ({self.doing})" if self.doing else ""
                limit_s, grace_s = min(_ANNOUNCING_MAY_TAKE_S, least_s), _TELLING_SHARE * self._ending_s
                ending = _within(limit_s, lambda: board.announce(reason, grace_s=grace_s))
            if ending is not None:  # else the files hang: that was waiting enough
                limit_s = min(_REPORTING_MAY_TAKE_S, least_s)
                told = _within(limit_s, lambda: self._report(board, track))
        if told is None:
            told = self._report_alone()
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
        self._show(f"{head}\n{told}\nthis rank's threads are at")
        if board is not None and ending is not None and self._leave_together(board, ending=ending, code=code):
            return
        with contextlib.suppress(
            Exception
        ):  # the abort of threads raises in this thread, which ends here anyway
            self._abort(code)

    def _leave_together(self, board: Board, *, ending: Ending, code: int) -> bool:
        """Wait until all have spoken, then leave with them. False where this rank must end the others."""
        began = time.monotonic()
        _within(1.0, board.leave)
        until = time.monotonic() + max(0.0, min(ending.leave_at - time.time(), self._ending_s + 1.0))
        all_leave = ending.rank != self.rank  # the one who announced it sees to those who do not come
        if not all_leave and self._last_word is not None:
            until = max(until, began + _LAST_WORDS_MAY_TAKE_S)
        while time.monotonic() < until:
            if not all_leave:
                all_leave = bool(_within(1.0, board.all_leave))
                if all_leave:
                    until = min(until, time.monotonic() + max(0.0, ending.leave_at - time.time()))
            time.sleep(max(0.0, min(0.05, until - time.monotonic())))
        if all_leave and self._leave is not None:
            self._leave(code)
            return True
        # Ranks that are threads: the one that announced it ends them all.
        return self._leave is None and ending.rank != self.rank

    def _report(self, board: Board, track: Track | None) -> str:
        # Another rank's end may come while this one still asks.
        if self._looking.acquire(timeout=self._look_s):
            self._looking.release()
        lines = board.cut()
        absent = [] if track is None else board.absent(track)
        asked = len(self._reach.found) if self._reach is not None else 0
        return describe_finding(lines, absent, waits=track is not None, num_asked=asked)

    def _report_alone(self) -> str:
        """What is known without the board."""
        cut = [] if self._reach is None else find_cut({self._host: self._reach.found}, here=self._host)
        return describe_unknown(cut, directory=None if self._board is None else self._board.directory)

    def _show(self, message: str) -> None:
        stream = sys.__stderr__
        if stream is None:
            return
        # One write: the ranks share a terminal.
        stream.write(f"hpctrain: {message}\n")
        stream.flush()
        with contextlib.suppress(OSError, ValueError):  # a stream that is no file
            faulthandler.dump_traceback(file=stream, all_threads=True)


def _quietly(function: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        function()


def _within(seconds: float, function: Callable[[], T]) -> T | None:
    """What `function` returns, in another thread; None if it fails on a file or takes longer."""
    found: list[T] = []
    thread = threading.Thread(
        target=_quietly, args=(lambda: found.append(function()),), name="hpctrain-files", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def exit_now(code: int) -> None:
    """End this process at once. The messages of other threads that are not written yet are lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
