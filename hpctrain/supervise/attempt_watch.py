"""Follows one attempt while it runs: notes when training begins and when a rank or node is lost, and says when to
end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from hpctrain.errors import ExitCode
from hpctrain.launch import EndRequest, RankFailure
from hpctrain.supervise.log_lines import LogLines
from hpctrain.supervise.node_watch import NodeWatch
from hpctrain.supervise.run_progress import RunProgress
from hpctrain.supervise.signs import says_a_loss

# From the first line that names a lost rank or node until the others are ended: they may still say why.
_GRACE_S = 1.5


@final
class AttemptWatch:
    """An `Observer` of a launch.

    kill_after_s: see `EndRequest`. training_begins: called once, with the step from which training begins and the
    time (epoch). lost_at: first sign of a loss (epoch). silent_nodes: that no longer answered. overdue: training has
    not begun in time; what the ranks still do and print while they are ended for that does not count.
    """

    def __init__(
        self,
        progress: RunProgress,
        *,
        nodes: NodeWatch,
        start_within_s: float | None,
        kill_after_s: float,
        training_begins: Callable[[int, float], None],
    ) -> None:
        self.log = LogLines()
        self.lost_at: float | None = None
        self.silent_nodes: tuple[str, ...] = ()
        self.overdue = False
        self._has_begun = False
        self._kill_after_s = kill_after_s
        self._progress = progress
        self._nodes = nodes
        self._start_by_s = None if start_within_s is None else time.monotonic() + start_within_s
        self._training_begins = training_begins
        self._end_by_s: float | None = None

    def launched(self, pid: int) -> None:
        self._nodes.launched(pid)

    def saw_line(self, line: bytes, failure: RankFailure | None) -> None:
        if self.overdue:
            return
        self.log.add(line)
        if self.lost_at is not None:
            return
        if failure is not None and failure.exit_code == ExitCode.STOPPED_EARLY:
            return  # the other ranks have saved too, and are about to end
        if failure is not None or says_a_loss(line.decode(errors="replace")):
            self.lost_at = time.time()
            self._end_by_s = time.monotonic() + _GRACE_S

    def must_end(self) -> EndRequest | None:
        self._nodes.look()
        lost = self._nodes.lost()
        if lost:
            self.silent_nodes = tuple(lost)
            self.lost_at = min([*lost.values(), *([] if self.lost_at is None else [self.lost_at])])
            return self._end(f"{', '.join(lost)} does not answer any more")
        self.look_for_begin()
        if not self._has_begun and self._start_by_s is not None and time.monotonic() > self._start_by_s:
            self.overdue = True
            return self._end("training does not begin")
        if self._end_by_s is not None and time.monotonic() > self._end_by_s:
            return self._end("a rank is lost")
        return None

    def _end(self, reason: str) -> EndRequest:
        return EndRequest(reason=reason, kill_after_s=self._kill_after_s)

    def look_for_begin(self) -> None:
        """Calls `training_begins` if training has begun since the last look."""
        step = None if self._has_begun or self.overdue else self._progress.first_step()
        if step is not None:
            self._has_begun = True
            self._training_begins(step, time.time())
