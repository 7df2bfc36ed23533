"""Position of each rank: which operation of which communicator it is in. Small files, and pure comparisons of them.

A rank that hangs outside any collective cannot report it. Every rank therefore writes its position to a file from
time to time, and waiting ranks read which others have not reached their operation. Nothing here communicates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpctrain.comm.collectives.agreement import describe_ranks
from hpctrain.storage import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """One rank's place in one communicator. sequence: operations begun on it, 0 before the first."""

    sequence: int
    operation: str
    waiting_s: float | None  # None: the operation is complete
    signature: str | None = None  # must be equal on all ranks in the operation; None: not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """Contents of one rank's file.

    addresses, port: where its host can be probed (`hpctrain.comm.watchdog.host_probe`); port None: nowhere.
    reached: for each other host, whether it answered the last probe. leaving: the rank has printed its report.
    """

    rank: int
    host: str
    pid: int
    written: float  # seconds since the epoch, by the writer's clock
    step: int | None = None
    doing: str = ""  # label of its current activity
    groups: dict[str, GroupPosition] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    port: int | None = None
    reached: dict[str, bool] = field(default_factory=dict)
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Announcement by `rank` that the run ends: all ranks print their reports and exit at `leave_at` (epoch)."""

    rank: int
    host: str
    written: float  # epoch
    leave_at: float
    reason: str


def position_path(directory: Path, *, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def call_path(directory: Path, *, rank: int) -> Path:
    """File that exists when other ranks have waited long for `rank`, which then prints its stacks."""
    return directory / f"late-{rank}"


def alarm_path(directory: Path) -> Path:
    """File that is touched when an operation is late: every rank then probes the other hosts."""
    return directory / "late"


def ending_path(directory: Path) -> Path:
    """File that exists when the run ends: see `Ending`."""
    return directory / "ending.json"


def announce_ending(ending: Ending, *, directory: Path) -> Ending:
    """Publishes `ending` unless another rank was first. Returns the one that was published."""
    partial = directory / f"ending-{ending.rank}.partial"
    partial.write_text(json.dumps(asdict(ending)))
    try:
        os.link(partial, ending_path(directory))  # unlike a rename, it replaces nothing
    except FileExistsError:
        return read_ending(directory) or ending
    finally:
        partial.unlink(missing_ok=True)
    return ending


def read_ending(directory: Path, *, since: float = 0.0) -> Ending | None:
    """Returns the announcement; None if there is none, or it is older than `since` (epoch)."""
    try:
        ending = Ending(**json.loads(ending_path(directory).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return ending if ending.written >= since else None


def write_position(position: RankPosition, *, directory: Path) -> None:
    """Replaces this rank's file atomically, so that no rank reads half of it."""
    path = position_path(directory, rank=position.rank)
    replace_file(path, json.dumps(asdict(position)).encode(), partial=path.with_suffix(".partial"))


def read_positions(directory: Path, *, ranks: Sequence[int], since: float = 0.0) -> dict[int, RankPosition]:
    """Returns the positions by rank. Omits ranks whose file is missing, unreadable or older than `since` (epoch),
    that is, from an earlier attempt of the run."""
    found = {}
    for rank in ranks:
        try:
            fields = json.loads(position_path(directory, rank=rank).read_text())
            groups = {name: GroupPosition(**values) for name, values in fields.pop("groups").items()}
            position = RankPosition(**fields, groups=groups)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if position.written >= since:
            found[rank] = position
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A rank that has not begun an operation, or is silent.

    place: its host and process, "" if unknown. state: what it was doing last. silent_s: since it was last heard of;
    None: recently.
    """

    rank: int
    place: str
    state: str
    silent_s: float | None = None

    @property
    def text(self) -> str:
        where = f" on {self.place}" if self.place else ""
        silent = "" if self.silent_s is None else f", last heard of {self.silent_s:.0f} s ago"
        return f"rank {self.rank}{where} {self.state}{silent}"


def fold_absences(absences: Sequence[Absence], *, max_lines: int = 16) -> list[str]:
    """Returns one line for each absence, or, for more than `max_lines`, one for all ranks in the same state. Pure.

    Of more states than `max_lines`, those of the fewest and of the most ranks are named, and the others counted.
    """
    if len(absences) <= max_lines:
        return [absence.text for absence in absences]
    by_state: dict[tuple[str, bool], list[Absence]] = {}
    for absence in absences:
        by_state.setdefault((absence.state, absence.silent_s is None), []).append(absence)
    # Few ranks in a state are what is looked for: they come first.
    groups = sorted(by_state.values(), key=lambda group: (len(group), group[0].rank))
    if len(groups) <= max_lines:
        return [_one_line(group) for group in groups]
    few, most = groups[: max_lines - 4], groups[-3:]
    others = [absence.rank for group in groups[max_lines - 4 : -3] for absence in group]
    named = [_one_line(group) for group in (*few, *most)]
    return [*named, f"{len(others)} ranks in {len(groups) - len(named)} other states: {_some_ranks(others)}"]


def _one_line(group: Sequence[Absence]) -> str:
    if len(group) == 1:
        return group[0].text
    silences = [absence.silent_s for absence in group if absence.silent_s is not None]
    silent = f", last heard of {min(silences):.0f} to {max(silences):.0f} s ago" if silences else ""
    return f"{len(group)} ranks, {_some_ranks([absence.rank for absence in group])}: each {group[0].state}{silent}"


def _some_ranks(ranks: Sequence[int], *, max_characters: int = 200) -> str:
    text = describe_ranks(ranks)
    return text if len(text) <= max_characters else text[:max_characters].rpartition(",")[0] + ", ..."


def find_absent(
    positions: Mapping[int, RankPosition],
    *,
    members: Sequence[int],
    group: str,
    sequence: int,
    now: float,
    usual_silence_s: float,
    silent_at_most_s: float | None = None,
) -> list[Absence]:
    """Returns the `members` that have not begun operation `sequence` of the communicator `group`, by their files.

    A rank without a recent file counts as absent. The text of one whose file is older than `usual_silence_s` at `now`
    (epoch) includes how long it has been silent: the file's age, or `silent_at_most_s` if that is less.
    """
    absent = []
    for rank in members:
        position = positions.get(rank)
        if position is None:
            absent.append(Absence(rank=rank, place="", state="has written no position file"))
            continue
        place = position.groups.get(group, GroupPosition(sequence=0, operation="nothing", waiting_s=None))
        if place.sequence >= sequence:
            continue
        silent_s = _silence(position, now=now, at_most_s=silent_at_most_s)
        absent.append(
            Absence(
                rank=rank, place=_place(position), state=_whereabouts(position, place, sequence=sequence),
                silent_s=silent_s if silent_s > usual_silence_s else None,
            )
        )  # fmt: skip
    return absent


def _place(position: RankPosition) -> str:
    return f"{position.host} (process {position.pid})"


def _silence(position: RankPosition, *, now: float, at_most_s: float | None) -> float:
    silent_s = now - position.written
    return silent_s if at_most_s is None else min(silent_s, at_most_s)


def find_different(
    positions: Mapping[int, RankPosition],
    *,
    rank: int,
    group: str,
    sequence: int,
    signature: str,
    num_expected: int = 0,
) -> str | None:
    """Returns an error message if ranks in operation `sequence` of `group` have different signatures, else None.

    rank, signature: of this rank. The most frequent signature counts as correct. In a tie it is the lowest rank's, and
    None is returned until `num_expected` ranks are in the operation, as the next one may decide.
    """
    held = {rank: signature}
    for other, position in positions.items():
        place = position.groups.get(group)
        if place is not None and place.sequence == sequence and place.waiting_s is not None:
            held[other] = place.signature or signature
    values = [held[other] for other in sorted(held)]
    if len(set(values)) == 1:
        return None
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    if 2 * values.count(usual) <= len(values) < num_expected:
        return None
    different = [
        f"rank {other}{_on_host(positions.get(other))} has {held[other]}"
        for other in sorted(held)
        if held[other] != usual
    ]
    return f"ranks called number {sequence} of {group} with different arguments: " + (
        f"{', '.join(different[:8])}, where {values.count(usual)} of {len(values)} have {usual}"
    )


def _on_host(position: RankPosition | None) -> str:
    return "" if position is None else f" on {position.host}"


def find_silent(
    positions: Mapping[int, RankPosition],
    *,
    now: float,
    usual_silence_s: float,
    silent_at_most_s: float | None = None,
) -> list[Absence]:
    """Returns the ranks that have not renewed their file for `usual_silence_s`: stopped, or cut off.

    With a backend that serves all groups in one thread, as Horovod does, a stopped rank also blocks groups that
    it is not in.
    """
    return [
        Absence(
            rank=rank,
            place=_place(position),
            state="is silent",
            silent_s=_silence(position, now=now, at_most_s=silent_at_most_s),
        )
        for rank, position in positions.items()
        if _silence(position, now=now, at_most_s=silent_at_most_s) > usual_silence_s
    ]


def _whereabouts(position: RankPosition, place: GroupPosition, *, sequence: int) -> str:
    if place.sequence < sequence - 1:
        # Its file is older: a rank writes it when it makes no progress, and this one has passed operations since.
        return f"came to number {sequence - 1} of it and not to this one, and is silent"
    step = "" if position.step is None else f" in step {position.step}"
    step += f" ({position.doing})" if position.doing else ""
    for name, other in position.groups.items():
        if other.waiting_s is not None:
            return f"waits in {other.operation} number {other.sequence} of {name}{step}"
    if place.sequence == 0:
        return f"has begun no operation on it and waits in no other{step}"
    return f"is past {place.operation} number {place.sequence} of it and waits in no operation{step}"
