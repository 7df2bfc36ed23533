"""The texts that a rank's watcher prints when it ends the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.comm.collectives.agreement import describe_ranks
from hpctrain.comm.watchdog.operation_state import Track
from hpctrain.comm.watchdog.rank_status import Absence, Ending, fold_absences


def headline(
    track: Track | None,
    *,
    ending: Ending | None,
    rank: int,
    host: str,
    step: int | None,
    timeout_s: float,
    ending_s: float,
    doing: str = "",
) -> str:
    """Returns which rank ends and what it was doing. track: that of its longest wait; None if in no operation.

    ending_s: the last part of `timeout_s`, reserved for reporting and exiting.
    """
    here = f"rank {rank} on {host}"
    in_step = ("" if step is None else f" in step {step}") + (f" ({doing})" if doing else "")
    limit = f"(limit {timeout_s:g} s, including {ending_s:g} s to end the run)"
    waited = "is in no operation" + in_step
    if track is not None:
        waited = f"has waited {track.waited_s():.1f} s{in_step} for {track.describe()}"
    if ending is None or (track is not None and track.waited_s() > timeout_s - ending_s):
        return f"{here} {waited} {limit}"
    if ending.rank == rank:
        return f"{here} ends the run: {ending.reason}\nit {waited}"
    return f"{here} ends with rank {ending.rank} on {ending.host}: {ending.reason}\nhere: {here} {waited}"


def describe_finding(cut: Sequence[str], absent: Sequence[Absence], *, waits: bool, num_asked: int) -> str:
    """Returns the report. cut: lines of `find_cut`. waits: this rank is in an operation. num_asked: hosts probed."""
    lines = list(cut)
    if absent:
        lines.append(f"did not come: {describe_ranks([absence.rank for absence in absent])}")
        lines += [f"  {line}" for line in fold_absences(absent)]
    elif waits and not cut:
        why = "network, or different buffers on the ranks"
        if num_asked:
            why = f"the {num_asked} other hosts that were probed answer"
        lines.append(f"all ranks have begun it: the operation itself hangs ({why})")
    elif waits:
        lines.append("all ranks have begun it: the operation itself hangs")
    return "\n".join(lines) or "no rank is known to wait for this one"


def describe_unknown(cut: Sequence[str], *, directory: Path | None) -> str:
    """Returns the report's lines if the ranks' positions are unknown. directory: of the positions; None: none given."""
    why = "no directory for positions was given"
    if directory is not None:
        why = f"the files in {directory} cannot be read"
    return "\n".join([*cut, f"which rank did not come is not known: {why}"])
