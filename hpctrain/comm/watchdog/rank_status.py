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
    """A rank that has not begun an operation, and a text with its last known state."""

    rank: int
    text: str


def find_absent(
    positions: Mapping[int, RankPosition],
    *,
    members: Sequence[int],
    group: str,
    sequence: int,
    now: float,
    usual_silence_s: float,
) -> list[Absence]:
    """Returns the `members` that have not begun operation `sequence` of the communicator `group`, by their files.

    A rank without a recent file counts as absent. The text of one whose file is older than `usual_silence_s` at `now`
    (epoch) includes the file's age.
    """
    absent = []
    for rank in members:
        position = positions.get(rank)
        if position is None:
            absent.append(Absence(rank=rank, text=f"rank {rank} has written no position file"))
            continue
        place = position.groups.get(group, GroupPosition(sequence=0, operation="nothing", waiting_s=None))
        if place.sequence >= sequence:
            continue
        text = f"rank {rank} on {position.host} (process {position.pid}) {_whereabouts(position, place)}"
        silent_s = now - position.written
        text += f", last heard of {silent_s:.0f} s ago" if silent_s > usual_silence_s else ""
        absent.append(Absence(rank=rank, text=text))
    return absent


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
    positions: Mapping[int, RankPosition], *, now: float, usual_silence_s: float
) -> list[Absence]:
    """Returns the ranks that have not renewed their file for `usual_silence_s`: stopped, or cut off.

    With a backend that serves all groups in one thread, as Horovod does, a stopped rank also blocks groups that
    it is not in.
    """
    return [
        Absence(
            rank=rank,
            text=f"rank {rank} on {position.host} (process {position.pid}) was last heard of "
            f"{now - position.written:.0f} s ago",
        )
        for rank, position in positions.items()
        if now - position.written > usual_silence_s
    ]


def _whereabouts(position: RankPosition, place: GroupPosition) -> str:
    step = "" if position.step is None else f" in step {position.step}"
    step += f" ({position.doing})" if position.doing else ""
    for name, other in position.groups.items():
        if other.waiting_s is not None:
            return f"waits in {other.operation} number {other.sequence} of {name}{step}"
    if place.sequence == 0:
        return f"has begun no operation on it and waits in no other{step}"
    return f"is past {place.operation} number {place.sequence} of it and waits in no operation{step}"
