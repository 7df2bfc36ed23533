"""Finds the rank that failed first in the launcher's output."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

# Open MPI 4 and 5 report a rank that was ended by a signal; srun also one that exited with a code.
_OPEN_MPI = re.compile(
    rb"process rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on\s+signal (?P<signal>\d+)"
)
_SRUN = re.compile(rb"srun: error: (?P<node>\S+): tasks? (?P<rank>[\d,-]+): (?P<text>[A-Z][a-z0-9 ]+)")
_SRUN_CODE = re.compile(r"Exited with exit code (\d+)")
# The ranks' own line at an early end that is no failure.
STOPPED = re.compile(r"hpctrain: stopped after step \d+ of \d+ \((?P<reason>[^)]*)\); the state is saved")
_SIGNALS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A rank (srun may report several at once: `0-1`) that exited with `exit_code`, or was ended by `signal`."""

    rank: str
    node: str
    exit_code: int
    signal: int | None = None


def find_failure(line: bytes) -> RankFailure | None:
    """Returns the failure reported in this line of a launcher's output, or in two that were joined by a space; None for
    any other line.

    srun's `Terminated` is ignored: srun ends the remaining ranks in this way after another one has failed.
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
    number = _SIGNALS.get(text)
    return None if number is None or number == signal.SIGTERM else _ended(match, number=number)


def signal_name(number: int) -> str:
    """Number and name of a signal, for example `signal 9 (SIGKILL: ...)`, with the usual sender of SIGKILL."""
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
