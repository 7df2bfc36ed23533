"""The messages that a rank's watcher prints when it ends the run, and the immediate exit of the process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hpctrain.comm.collectives.activity import Section
from hpctrain.comm.collectives.agreement import describe_ranks
from hpctrain.comm.watchdog.board.node_files import Ending
from hpctrain.comm.watchdog.board.rank_status import Absence, HangEvidence
from hpctrain.comm.watchdog.board.short_stacks import StackGroup
from hpctrain.comm.watchdog.host_probe import name_hosts
from hpctrain.comm.watchdog.operation_state import Wait


def headline(
    track: Wait | None,
    *,
    ending: Ending | None,
    rank: int,
    host: str,
    step: int | None,
    timeout_s: float,
    ending_s: float,
    doing: str = "",
    section: Section | None = None,
    hung: str = "",
) -> str:
    """Returns the line that states which rank ends and what it was doing.

    track: the longest wait of this rank; None if this rank waits for nothing.
    timeout_s: limit of the wait, in seconds.
    ending_s: last part of `timeout_s`, in seconds, which is reserved for reporting and exiting.
    section: section of the run for which `timeout_s` is configured; None if `timeout_s` is the limit of the whole run.
    hung: why this rank ends the run before the limit is over; "" if the limit is over.
    """
    here = f"rank {rank} on {host}"
    in_step = ("" if step is None else f" in step {step}") + (f" ({doing})" if doing else "")
    which = "limit" if section is None else f"limit of the section {section.value}"
    limit = f"({which} {timeout_s:g} s, including {ending_s:g} s to end the run)"
    waited = "is in no operation" + in_step
    if track is not None:
        waited = f"has waited {track.waited_s():.1f} s{in_step} for {track.describe()}"
    if hung:
        return f"{here} {waited} ({hung})"
    if ending is None or (track is not None and track.waited_s() > timeout_s - ending_s):
        return f"{here} {waited} {limit}"
    if ending.rank == rank:
        return f"{here} ends the run: {ending.reason}\nit {waited}"
    return f"{here} ends with rank {ending.rank} on {ending.host}: {ending.reason}\nhere: {here} {waited}"


def print_with_stacks(message: str) -> None:
    """Prints `message` and the stacks of all threads of this process to the original standard error."""
    stream = sys.__stderr__
    if stream is None:
        return
    # A single write, as the ranks share a terminal.
    stream.write(f"hpctrain: {message}\n")
    stream.flush()
    with contextlib.suppress(OSError, ValueError):  # a stream that is not a file
        faulthandler.dump_traceback(file=stream, all_threads=True)


def describe_finding(found: HangEvidence, *, waits: bool, num_asked: int) -> str:
    """Returns the report on why an operation does not end.

    found: what the files of all nodes show.
    waits: True if this rank is in an operation.
    num_asked: number of hosts that were probed.
    """
    lines = list(found.cut)
    if found.absent:
        ranks = [rank for absence in found.absent for rank in absence.ranks]
        lines.append(f"did not come: {describe_some(ranks)}")
        lines += [f"  {line}" for line in fold_absences(found.absent)]
        if len(found.waiting) > 1:  # others than this rank
            lines.append(f"wait for it: {describe_some(found.waiting)}")
    elif waits and not found.unread:
        why = "" if found.cut else " (network, or different buffers on the ranks)"
        if num_asked and not found.cut:
            why = f" (the {num_asked} other hosts that were probed answer)"
        lines.append(f"all ranks have begun it: the operation itself hangs{why}")
    lines += describe_stacks(found.stacks)
    if found.unread:
        lines.append(
            f"the files of {name_hosts(list(found.unread))} cannot be read: what their ranks do is not known"
        )
    return "\n".join(lines) or "no rank is known to wait for this one"


def describe_unknown(cut: Sequence[str], *, directory: Path | None) -> str:
    """Returns the report for the case that it is not known what the other ranks are doing.

    cut: lines about hosts that are cut off.
    directory: folder of the files in which the ranks state what they do, which cannot be read; None if no folder was
    given.
    """
    why = "the ranks share no directory in which they record where they are"
    if directory is not None:
        why = f"the files in {directory} cannot be read"
    return "\n".join([*cut, f"which rank did not come is not known: {why}"])


def describe_stacks(groups: Sequence[StackGroup], *, most_late: int = 8, most_waiting: int = 4) -> list[str]:
    """Returns one line per group of ranks with equal stacks, and a line that counts the groups that are not shown.

    Pure.

    most_late: number of groups of late ranks (for which other ranks wait) that are shown.
    most_waiting: number of groups of waiting ranks that are shown.
    """
    shown = [group for group in groups if group.late][:most_late]
    shown += [group for group in groups if not group.late][:most_waiting]
    lines = []
    for group in shown:
        several = len(group.ranks) > 1
        at = f": {group.text}"
        if not group.text.startswith("no stack"):
            at = f" {('are' if several else 'is') if group.late else 'wait' + 's' * (not several)} at {group.text}"
        lines.append(f"  {describe_some(group.ranks)}{at}")
    if others := [rank for group in groups if group not in shown for rank in group.ranks]:
        lines.append(
            f"  {len(others)} more with {len(groups) - len(shown)} other stacks: {describe_some(others)}"
        )
    return ["stacks, the innermost call first:", *lines] if lines else []


def fold_absences(absences: Sequence[Absence], *, max_lines: int = 16) -> list[str]:
    """Returns lines about ranks that have not started an operation. Pure.

    absences: the ranks, and what each did last (its state).

    There is one line per absence. If there are more than `max_lines` absences, there is one line per state, with all
    ranks in that state.

    If there are more than `max_lines` states, the states with the fewest and with the most ranks get a line each. The
    last line counts the ranks in the other states.
    """
    if len(absences) <= max_lines:
        return [absence.text for absence in absences]
    by_state: dict[tuple[str, bool], list[Absence]] = defaultdict(list)
    for absence in absences:
        by_state[absence.state, absence.silent_s is None].append(absence)
    # Few ranks in a state are what is looked for: they come first.
    groups = sorted(by_state.values(), key=lambda group: (len(_ranks_of(group)), group[0].ranks[0]))
    if len(groups) <= max_lines:
        return [_one_line(group) for group in groups]
    few, most = groups[: max_lines - 4], groups[-3:]
    others = [rank for group in groups[max_lines - 4 : -3] for rank in _ranks_of(group)]
    named = [_one_line(group) for group in (*few, *most)]
    return [
        *named,
        f"{len(others)} ranks in {len(groups) - len(named)} other states: {describe_some(others)}",
    ]


def _ranks_of(group: Sequence[Absence]) -> list[int]:
    return [rank for absence in group for rank in absence.ranks]


def _one_line(group: Sequence[Absence]) -> str:
    if len(group) == 1:
        return group[0].text
    ranks = _ranks_of(group)
    places = list(dict.fromkeys(absence.place for absence in group if len(absence.ranks) > 1))
    where = f" on {name_hosts(places)}" if places else ""
    silences = [absence.silent_s for absence in group if absence.silent_s is not None]
    silent = f", last heard of {min(silences):.0f} to {max(silences):.0f} s ago" if silences else ""
    return f"{len(ranks)} ranks, {describe_some(ranks)}{where}: each {group[0].state}{silent}"


def describe_some(ranks: Sequence[int], *, max_characters: int = 200) -> str:
    """Returns the text of `describe_ranks`. A text of more than `max_characters` is cut after a rank, and the number of
    all ranks is appended.
    """
    text = describe_ranks(ranks)
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters].rpartition(',')[0]}, ... ({len(ranks)} in all)"


def exit_now(code: int) -> None:
    """Ends this process at once. Unwritten messages of other threads are lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
