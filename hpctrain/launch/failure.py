"""Finds in the launcher's output which rank failed first."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import final

from hpctrain.errors import ExitCode

# Open MPI 4 and 5 report a rank that was ended by a signal; srun also one that exited with a code.
_OPEN_MPI = re.compile(
    rb"process rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on\s+signal (?P<signal>\d+)"
)
_SRUN = re.compile(
    rb"srun: error: (?P<node>\S+): tasks? (?P<rank>[\d,-]+): (?P<text>Out Of Memory|[A-Z][a-z0-9 ]+)"
)
_SRUN_CODE = re.compile(r"Exited with exit code (\d+)")
# The ranks' own line at an early end that is not a failure.
STOPPED = re.compile(r"hpctrain: stopped after step \d+ of \d+ \((?P<reason>[^)]*)\); the state is saved")
# Slurm or srun ends the ranks: a rank that is killed after this line need not be the one that failed.
STEP_ENDS = re.compile(
    r"srun: (Job step aborted|Terminating (StepId|job step)|launch/slurm: .*Terminating|Force Terminated)"
    r"|slurmstepd\S*: error: \*\*\* (STEP|JOB) \S+ ON \S+ CANCELLED AT"
)
# Printed by Open MPI 5's TCP transport on a rank that has lost a peer. The rank then exits with 14, MPI_ERR_UNKNOWN.
LOST_PEER = re.compile(r"An error occurred in Socket closed")
LOST_PEER_CODE = 14
# Exit codes that no rank has because another one has failed.
OWN_FAILURE_CODES = frozenset(
    {
        ExitCode.USAGE, ExitCode.DATA, ExitCode.CHECKPOINT, ExitCode.LAUNCH, ExitCode.DIVERGED,
        ExitCode.OUT_OF_MEMORY,
    }
)  # fmt: skip
_OUT_OF_MEMORY = "Out Of Memory"  # a signal number of Slurm's own, for a rank that the kernel has killed
_SIGNALS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The failure of a rank.

    rank: the rank, or several ranks (srun may report `0-1`).
    node: name of the node.
    exit_code: exit code of the rank; 128 + n if signal n ended the rank.
    signal: number of the signal that ended the rank; None if the rank exited by itself.
    """

    rank: str
    node: str
    exit_code: int
    signal: int | None = None


def find_failure(line: bytes) -> RankFailure | None:
    """Returns the failure that a line of a launcher's output reports; None for any other line.

    srun's `Terminated` is ignored, because srun ends the remaining ranks in this way after another rank has failed.
    srun's `Out Of Memory` counts as SIGKILL.

    line: one line, or two lines joined by a space.
    """
    match = _OPEN_MPI.search(line)
    if match is not None:
        return _ended(match, number=int(match["signal"]))
    match = _SRUN.search(line)
    if match is None:
        return None
    text = match["text"].decode().strip()
    left = _SRUN_CODE.match(text)
    if left is not None:
        return RankFailure(rank=match["rank"].decode(), node=_node(match), exit_code=int(left[1]))
    number = signal.SIGKILL if text == _OUT_OF_MEMORY else _SIGNALS.get(text)
    return None if number is None or number == signal.SIGTERM else _ended(match, number=number)


# Weights of failures: a reported failure replaces an earlier one of lower weight.
_LOST_ITS_PEER, _WAS_ENDED, _STOPPED_EARLY, _CAUSE = range(1, 5)


@final
class FirstFailure:
    """Follows the output of a launcher and its ranks, and keeps the failure that caused all other failures.

    The failures have this order of precedence: a rank that failed by itself; a rank that stopped early (75); a rank
    that ended after srun had started to end the step; a rank that Open MPI 5 ended, with the reported code 137, because
    the rank had lost a peer. Of several failures with the same precedence the first is kept.
    """

    def __init__(self) -> None:
        self.failure: RankFailure | None = None
        self._weight = 0
        self._step_ends = False
        self._lost_peer = False

    @property
    def is_cause(self) -> bool:
        """True if the rank has failed by itself: the rank neither stopped early, nor ended because of another rank."""
        return self._weight == _CAUSE

    def saw(self, line: bytes, failure: RankFailure | None) -> None:
        """Processes one line of the output. failure: result of `find_failure` for this line."""
        text = line.decode(errors="replace")
        self._step_ends = self._step_ends or STEP_ENDS.search(text) is not None
        self._lost_peer = self._lost_peer or LOST_PEER.search(text) is not None
        if failure is None:
            return
        weight = self._weigh(failure)
        if weight == _LOST_ITS_PEER:
            failure = replace(failure, exit_code=128 + signal.SIGKILL)
        if weight > self._weight:
            self.failure, self._weight = failure, weight

    def _weigh(self, failure: RankFailure) -> int:
        if failure.exit_code == ExitCode.STOPPED_EARLY:
            return _STOPPED_EARLY
        has_lost_peer = self._lost_peer or self._step_ends  # the message on the lost peer may be missing
        if failure.signal is None and failure.exit_code == LOST_PEER_CODE and has_lost_peer:
            return _LOST_ITS_PEER
        return _WAS_ENDED if self._step_ends and failure.exit_code not in OWN_FAILURE_CODES else _CAUSE


def signal_name(number: int) -> str:
    """Returns number and name of a signal, such as `signal 15 (SIGTERM)`. For SIGKILL, the usual senders are added."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    hint = ": often from the kernel, out of memory, or from the scheduler" if name == "SIGKILL" else ""
    return f"signal {number} ({name}{hint})"


def _ended(match: re.Match[bytes], *, number: int) -> RankFailure:
    return RankFailure(rank=match["rank"].decode(), node=_node(match), exit_code=128 + number, signal=number)


def _node(match: re.Match[bytes]) -> str:
    return match["node"].decode(errors="replace")
