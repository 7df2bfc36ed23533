"""The status board: a folder in which each rank writes its position and reads those of the others.

Normally only the board's own thread accesses these files: if the file system hangs, that thread is blocked, but the
watcher's deadline still holds. While a rank's operations begin and end as they did before, its thread touches no file:
it begins to look, and to write its position, when nothing has begun or ended for longer than usual.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from hpctrain.comm.watchdog.host_probe import HostReachability, ranks_to_read
from hpctrain.comm.watchdog.network_partition import find_cut
from hpctrain.comm.watchdog.operation_state import ProgressMonitor, Track
from hpctrain.comm.watchdog.rank_status import (
    Absence,
    Ending,
    GroupPosition,
    RankPosition,
    alarm_path,
    announce_ending,
    call_path,
    ending_path,
    find_absent,
    find_different,
    find_silent,
    read_ending,
    read_positions,
    write_position,
)

# Number of attempts to learn which hosts answer.
_LEARN_TRIES = 10
# A thread that wakes up later than planned by this much was suspended, or kept from running by a lock.
_AWAY_S = 1.0
# Of a larger world, only the first so many members of a group call the absent ones.
CALLING_RANKS = 64
# After this time in one operation, the ranks' signatures are compared: have all passed the same buffer?
_COMPARE_AFTER_S = 2.0
_COMPARE_AT_MOST_AFTER_S = 4.0
_COMPARISONS = 3  # per operation, since ranks enter it and renew their files at different times
_RANKS_COMPARED = 32
# Time that the ranks have to report after a mismatch was found.
_MISMATCH_GRACE_S = 2.5


@final
class Board:
    """One rank's access to the status board. The constructor raises OSError if the directory cannot be used."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        timeout_s: float,
        since: float,
        tracks: Callable[[], Sequence[Track]],
        step: Callable[[], int | None],
        doing: Callable[[], str],
        reach: HostReachability,
        show: Callable[[str], None],
        probe_hosts: Callable[[], None],
        notice: Callable[[], None],
    ) -> None:
        """since (epoch): older files are ignored, as they are from an earlier attempt of this run.
        tracks: returns the tracks, the world's first. show: prints a message with the stacks. probe_hosts: probes the
        other hosts. notice: called when `ending` is set."""
        self.directory = directory
        self.rank = rank
        self.ending: Ending | None = None
        self._timeout_s = timeout_s
        self._since = since
        self._tracks = tracks
        self._step = step
        self._doing = doing
        self._reach = reach
        self._show = show
        self._probe_hosts = probe_hosts
        self._notice = notice
        self._interval_s = min(1.0, timeout_s / 8)
        # Frequent enough for a recent position at the deadline, rare enough not to load the file system (1000 ranks).
        self.publish_s = max(self._interval_s, min(10.0, timeout_s / 20))
        self._published: float | None = None
        self._shown: float | None = None  # when this rank last showed its stacks because others asked
        self._leaving = False
        self._tries_left = _LEARN_TRIES
        self._compare_after_s = min(_COMPARE_AFTER_S, timeout_s / 4)
        self._compared: dict[str, tuple[int, int]] = {}  # group -> sequence, times
        self._progress = ProgressMonitor(at_most_s=timeout_s / 8)
        self._watched_until = time.monotonic()
        self._over = threading.Event()
        self._writing = threading.Lock()
        call_path(directory, rank=rank).unlink(missing_ok=True)
        if read_ending(directory, since=since) is None:  # an old file would prevent a new announcement
            ending_path(directory).unlink(missing_ok=True)
        self._alarm = self._alarm_time()
        self.alarmed: float | None = None
        self.publish()
        threading.Thread(target=self._run, name="hpctrain-board", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    # ---- this rank's file

    def publish(self) -> None:
        """Writes this rank's position now. Thread-safe."""
        with self._writing:
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
            )
        own = self._reach.own
        position = RankPosition(
            rank=self.rank,
            host=self._reach.here,
            pid=os.getpid(),
            written=time.time(),
            step=self._step(),
            doing=self._doing(),
            groups=groups,
            addresses=[] if own is None else list(own.addresses),
            port=None if own is None else own.port,
            reached=dict(self._reach.found),
            leaving=self._leaving,
        )
        write_position(position, directory=self.directory)

    def leave(self) -> None:
        """Publishes that this rank has printed its report and is ready to exit."""
        self._leaving = True
        self.publish()

    def _read(self, ranks: Sequence[int]) -> dict[int, RankPosition]:
        return read_positions(self.directory, ranks=ranks, since=self._since)

    # ---- the thread

    def _run(self) -> None:
        while True:
            pause_s, began = self._pause_s(), time.monotonic()
            if self._over.wait(pause_s):
                return
            if time.monotonic() > began + pause_s + _AWAY_S:
                # The timer without Python's lock may be ending this rank, unless this file is renewed.
                self._watched_until = time.monotonic() + 3 * self.publish_s
            # A full or missing disk must not end this thread; the deadline still holds.
            with contextlib.suppress(OSError):
                self._look()

    def _pause_s(self) -> float:
        return self._interval_s / (4 if self._is_alarmed() else 1)

    def _is_alarmed(self) -> bool:
        return self.alarmed is not None and time.monotonic() < self.alarmed + self._timeout_s

    def _is_busy_as_usual(self) -> bool:
        """Returns True while operations begin and end about as often as they did, and none takes long.

        Reads no file.
        """
        tracks = self._tracks()
        is_usual = self._progress.is_usual(map(Track.progress, tracks), now_s=time.monotonic())
        return is_usual and not any(track.waited_s() > _COMPARE_AT_MOST_AFTER_S for track in tracks)

    def _look(self) -> None:
        if self._tries_left:
            self._learn()
        is_busy = self._is_busy_as_usual()
        if is_busy and not self._is_alarmed() and time.monotonic() > self._watched_until:
            return
        if self._published is None or time.monotonic() >= self._published + self.publish_s:
            self.publish()
        self._answer_call()
        seen = self._alarm_time()
        if seen != self._alarm:
            self._alarm = seen
            self._begin_alarm()
        for track in self._tracks():
            self._compare(track)
        if self.ending is None:
            self.ending = read_ending(self.directory, since=self._since)
            if self.ending is not None:
                self._notice()

    def _answer_call(self) -> None:
        now = time.monotonic()
        if self._shown is not None and now < self._shown + self._timeout_s:
            return
        path = call_path(self.directory, rank=self.rank)
        if path.exists():
            path.unlink(missing_ok=True)
            self._shown = now
            self._show(f"other ranks wait for rank {self.rank} on {self._reach.here}; its threads are at")

    def _learn(self) -> None:
        """Learns which hosts answer, once the watcher knows of any."""
        if self._reach.others is None:
            return
        self._tries_left -= 1
        # A host that is busy may answer later; one behind a firewall never does.
        if self._reach.learn(timeout_s=min(2.0, self._timeout_s / 8)):
            self._tries_left = 0

    # ---- late operations

    def raise_alarm(self) -> None:
        """Makes every rank probe the other hosts."""
        alarm_path(self.directory).touch()

    def _begin_alarm(self) -> None:
        self.alarmed = time.monotonic()
        self._probe_hosts()

    def _alarm_time(self) -> int | None:
        try:
            return alarm_path(self.directory).stat().st_mtime_ns
        except OSError:
            return None

    def call_absent(self, track: Track) -> None:
        """Requests that the absent ranks print their stacks, before the deadline."""
        if self.rank not in track.members[:CALLING_RANKS]:
            return
        for absence in self.absent(track):
            call_path(self.directory, rank=absence.rank).touch()

    def reports_absences(self) -> bool:
        """Returns True if this rank's report names the absent ranks: of a large world only that of the announcing rank.

        Otherwise N ranks would read N files each.
        """
        others_report = self.ending is not None and self.ending.rank != self.rank
        return not others_report or len(self._tracks()[0].members) <= CALLING_RANKS

    def absent(self, track: Track) -> list[Absence]:
        """Returns the members of `track` that have not begun its operation; if none, silent ranks outside the group."""
        others = [rank for rank in track.members if rank != self.rank]
        positions = self._read(others)
        # A rank that took part in the operation before was alive then, whenever it has written its file.
        now, usual_silence_s, waited_s = time.time(), 3 * self.publish_s, track.waited_s()
        absent = find_absent(
            positions,
            members=others,
            group=track.group,
            sequence=track.sequence,
            now=now,
            usual_silence_s=usual_silence_s,
            silent_at_most_s=waited_s if track.sequence > 1 else None,
        )
        if absent:
            return absent
        outside = [rank for rank in self._tracks()[0].members if rank not in track.members]
        positions = self._read(outside)
        return find_silent(
            positions,
            now=now,
            usual_silence_s=usual_silence_s + self._timeout_s / 8,
            silent_at_most_s=waited_s,
        )

    def cut(self) -> list[str]:
        """Returns lines that name the hosts cut off, from the probes of all hosts. Empty if none, or unknown."""
        here = self._reach.here
        findings: dict[str, dict[str, bool]] = {here: dict(self._reach.found)}
        positions = self._read(ranks_to_read(self._tracks()[0].members))
        for position in positions.values():
            if time.time() - position.written > self._timeout_s:
                continue  # written before the operation began
            known = findings.setdefault(position.host, {})
            for host, answered in position.reached.items():
                known[host] = known.get(host, False) or answered
        return find_cut(findings, here=here)

    def _compare(self, track: Track) -> None:
        """If the current operation takes long, checks that all ranks in it have one signature; if not, ends the run."""
        sequence, signature = track.sequence, track.signature
        before, times = self._compared.get(track.group, (0, 0))
        if before != sequence and times:
            # That operation was only slow, and so may the next be: compare later, to save file accesses.
            del self._compared[track.group]
            self._compare_after_s = min(
                _COMPARE_AT_MOST_AFTER_S, self._timeout_s / 4, 2 * self._compare_after_s
            )
            times = 0
        if (
            signature is None
            or times == _COMPARISONS
            or track.waited_s() < (1 + times / 2) * self._compare_after_s
        ):
            return
        self._compared[track.group] = (sequence, times + 1)
        self.publish()
        others = [rank for rank in track.members if rank != self.rank]
        drawn = others if len(others) <= _RANKS_COMPARED else random.sample(others, _RANKS_COMPARED)
        wrong = find_different(
            self._read(drawn),
            rank=self.rank, group=track.group, sequence=sequence, signature=signature,
            num_expected=1 + len(drawn) if times < _COMPARISONS - 1 else 0,
        )  # fmt: skip
        if wrong is not None and track.sequence == sequence and track.since is not None:
            self.announce(wrong, grace_s=min(_MISMATCH_GRACE_S, self._timeout_s / 4))

    # ---- the end

    def announce(self, reason: str, *, grace_s: float) -> Ending:
        """Announces to all ranks that the run ends in `grace_s` seconds. Returns the announcement that was first."""
        now = time.time()
        asked = Ending(
            rank=self.rank, host=self._reach.here, written=now, leave_at=now + grace_s, reason=reason
        )
        self.ending = announce_ending(asked, directory=self.directory)
        self._notice()
        return self.ending

    def all_leave(self) -> bool:
        """Returns True if every rank of the world has printed its report."""
        members = self._tracks()[0].members
        positions = self._read(members)
        return len(positions) == len(members) and all(p.leaving for p in positions.values())
