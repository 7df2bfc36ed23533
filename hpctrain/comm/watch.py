"""The watcher: one thread that ends the run when a collective operation takes too long.

It looks at what this rank's communicators say they are doing, writes that to a file for the other ranks, and
reads theirs. It never communicates: the network may be what hangs.
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
from dataclasses import dataclass
from pathlib import Path
from typing import final

from hpctrain.comm.agreement import describe_ranks
from hpctrain.comm.positions import (
    Absence,
    GroupPosition,
    RankPosition,
    call_path,
    find_absent,
    find_silent,
    read_positions,
    write_position,
)
from hpctrain.errors import ExitCode

# A watcher that comes so much later than it wanted was stopped together with its process.
_SUSPENDED_AFTER_S = 5.0


@dataclass(slots=True)
class Track:
    """What one communicator does now. Written by the thread that uses it, read by the watcher."""

    group: str
    members: tuple[int, ...]
    sequence: int = 0
    operation: str = "nothing"
    detail: str = ""
    since: float | None = None  # monotonic; None: in no operation

    @contextlib.contextmanager
    def during(self, operation: str, detail: str = "") -> Iterator[None]:
        """Mark the time of one operation."""
        self.operation, self.detail = operation, detail
        self.sequence += 1
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = None


@final
class Watcher:
    """Watches every `Track` of one rank. `abort` is called at most once, from the watcher's thread."""

    def __init__(
        self, *, rank: int, timeout_s: float, abort: Callable[[int], None], directory: Path | None = None
    ) -> None:
        self.rank = rank
        self.step: int | None = None
        self._timeout_s = timeout_s
        self._interval_s = min(1.0, timeout_s / 8)
        # Often enough to be fresh at the deadline, seldom enough that 1000 ranks do not load the file system.
        self._publish_s = max(self._interval_s, min(10.0, timeout_s / 20))
        self._published: float | None = None
        self._directory: Path | None = None
        self._abort = abort
        self._host = socket.gethostname()
        self._tracks: list[Track] = []
        self._ended = threading.Event()
        self._shown: float | None = None  # when this rank last showed its stacks because others asked
        if directory is not None:
            self.publish_in(directory)
        threading.Thread(target=self._watch, name="hpctrain-watcher", daemon=True).start()

    def publish_in(self, directory: Path) -> None:
        """From now on leave this rank's position in `directory`, made if need be. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        # What an earlier attempt of this run left there would speak for ranks that have not started yet.
        call_path(directory, rank=self.rank).unlink(missing_ok=True)
        self._directory = directory
        self._publish()

    def track(self, *, group: str, members: tuple[int, ...]) -> Track:
        """Begin to watch a communicator. `group`: a name that all its members give it."""
        track = Track(group, members)
        self._tracks = [*self._tracks, track]  # a new list: the watcher may be walking over the old one
        return track

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(self._interval_s):
            away_s = time.monotonic() - looked - self._interval_s
            looked += away_s + self._interval_s
            if away_s > _SUSPENDED_AFTER_S:
                self._forgive(away_s)
            # A full or vanished disk must not end the watch: the deadline still holds.
            with contextlib.suppress(OSError):
                self._publish()
                self._answer_call()
            for track in self._tracks:
                since = track.since
                waited_s = 0.0 if since is None else time.monotonic() - since
                if waited_s > 0.75 * self._timeout_s:
                    with contextlib.suppress(OSError):
                        self._call_absent(track)
                if waited_s > self._timeout_s:
                    self._end_run(track, waited_s=waited_s)
                    return

    def _forgive(self, seconds: float) -> None:
        """This whole process stood still (`scontrol suspend`): that is no wait for another rank."""
        for track in self._tracks:
            if track.since is not None:
                track.since += seconds

    def _publish(self) -> None:
        now = time.monotonic()
        if self._directory is None or (
            self._published is not None and now < self._published + self._publish_s
        ):
            return
        self._published = now
        groups = {}
        for track in self._tracks:
            since = track.since
            waiting_s = None if since is None else time.monotonic() - since
            groups[track.group] = GroupPosition(
                sequence=track.sequence, operation=track.operation, waiting_s=waiting_s
            )
        position = RankPosition(
            rank=self.rank,
            host=self._host,
            pid=os.getpid(),
            written=time.time(),
            step=self.step,
            groups=groups,
        )
        write_position(position, directory=self._directory)

    def _absent(self, track: Track) -> list[Absence] | None:
        """None: not known, for want of a directory."""
        if self._directory is None:
            return None
        others = [rank for rank in track.members if rank != self.rank]
        positions = read_positions(self._directory, ranks=others)
        now, usual_silence_s = time.time(), 3 * self._publish_s
        absent = find_absent(
            positions,
            members=others,
            group=track.group,
            sequence=track.sequence,
            now=now,
            usual_silence_s=usual_silence_s,
        )
        if absent:
            return absent
        outside = [rank for rank in self._tracks[0].members if rank not in track.members]
        positions = read_positions(self._directory, ranks=outside)
        return find_silent(positions, now=now, usual_silence_s=usual_silence_s)

    def _call_absent(self, track: Track) -> None:
        """Ask the absent ranks to show their stacks, while there is still time to."""
        for absence in self._absent(track) or []:
            if self._directory is not None:
                call_path(self._directory, rank=absence.rank).touch()

    def _answer_call(self) -> None:
        now = time.monotonic()
        if self._directory is None or (self._shown is not None and now < self._shown + self._timeout_s):
            return
        path = call_path(self._directory, rank=self.rank)
        if path.exists():
            path.unlink(missing_ok=True)
            self._shown = now
            self._show(f"other ranks wait for rank {self.rank} on {self._host}; its threads are at")

    def _end_run(self, track: Track, *, waited_s: float) -> None:
        absent = self._absent(track)
        step = "" if self.step is None else f" in step {self.step}"
        message = (
            f"rank {self.rank} on {self._host} has waited {waited_s:.1f} s{step} for {track.operation} "
            f"number {track.sequence} of {track.group} {track.detail}".rstrip()
            + f" (limit {self._timeout_s:g} s)"
        )
        if absent:
            message += f"\ndid not come: {describe_ranks([absence.rank for absence in absent])}"
            message += "".join(f"\n  {absence.text}" for absence in absent)
        elif absent is None:
            message += "\nwhich rank did not come is not known: no directory for positions was given"
        else:
            message += (
                "\nevery rank came: the operation itself hangs (network, or different buffers on the ranks)"
            )
        self._show(f"{message}\nthis rank's threads are at")
        with contextlib.suppress(
            Exception
        ):  # the abort of threads raises in this thread, which ends here anyway
            self._abort(int(ExitCode.COMMUNICATION))

    def _show(self, message: str) -> None:
        stream = sys.__stderr__
        if stream is None:
            return
        # One write: the ranks share a terminal.
        stream.write(f"hpctrain: {message}\n")
        stream.flush()
        with contextlib.suppress(OSError, ValueError):  # a stream that is no file
            faulthandler.dump_traceback(file=stream, all_threads=True)
