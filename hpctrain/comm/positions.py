"""Where each rank stands: which operation of which communicator it is in. Small files, and a pure comparison.

A rank that hangs outside any collective cannot say so itself. Every rank therefore leaves its position in a
file now and then, and the ranks that wait read who is behind them. Nothing here communicates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """One rank's place in one communicator. sequence: operations begun on it, 0 before the first."""

    sequence: int
    operation: str
    waiting_s: float | None  # None: the operation is done, the rank does something else


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """What one rank's file says."""

    rank: int
    host: str
    pid: int
    written: float  # seconds since the epoch, by the writer's clock
    step: int | None = None
    groups: dict[str, GroupPosition] = field(default_factory=dict)


def position_path(directory: Path, *, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def call_path(directory: Path, *, rank: int) -> Path:
    """Present when other ranks have waited long for `rank`, which then shows its stacks."""
    return directory / f"late-{rank}"


def write_position(position: RankPosition, *, directory: Path) -> None:
    """Replace this rank's file in one step, so that nobody reads half of it."""
    path = position_path(directory, rank=position.rank)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(position)))
    os.replace(partial, path)


def read_positions(directory: Path, *, ranks: Sequence[int]) -> dict[int, RankPosition]:
    """What the ranks' files say; a rank whose file is missing or unreadable is left out."""
    found = {}
    for rank in ranks:
        try:
            fields = json.loads(position_path(directory, rank=rank).read_text())
            groups = {name: GroupPosition(**values) for name, values in fields.pop("groups").items()}
            found[rank] = RankPosition(**fields, groups=groups)
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A rank that did not come to an operation, and what is known of it."""

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
    """The `members` that have not begun operation `sequence` of the communicator `group`.

    A rank whose file says nothing newer is taken for absent: it has stopped, or it is where the file says.
    One that has been silent for more than `usual_silence_s` before `now` is told with the time.
    """
    absent = []
    for rank in members:
        position = positions.get(rank)
        if position is None:
            absent.append(Absence(rank=rank, text=f"rank {rank} has left no trace"))
            continue
        place = position.groups.get(group, GroupPosition(sequence=0, operation="nothing", waiting_s=None))
        if place.sequence >= sequence:
            continue
        text = f"rank {rank} on {position.host} (process {position.pid}) {_whereabouts(position, place)}"
        silent_s = now - position.written
        text += f", last heard of {silent_s:.0f} s ago" if silent_s > usual_silence_s else ""
        absent.append(Absence(rank=rank, text=text))
    return absent


def find_silent(
    positions: Mapping[int, RankPosition], *, now: float, usual_silence_s: float
) -> list[Absence]:
    """The ranks that have left no position for longer than `usual_silence_s`: stopped, or cut off.

    Where a backend works for all its groups at once, as Horovod does, a rank that has stopped holds up
    groups that it is not in.
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
    for name, other in position.groups.items():
        if other.waiting_s is not None:
            return f"waits in {other.operation} number {other.sequence} of {name}{step}"
    if place.sequence == 0:
        return f"has begun no operation on it and waits in no other{step}"
    return f"is past {place.operation} number {place.sequence} of it and waits in no operation{step}"
