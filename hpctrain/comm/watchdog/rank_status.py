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
    signature: str | None = None  # what all ranks must have the same in it; None: nothing is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """What one rank's file says.

    addresses, port, token: where its watcher listens (`hpctrain.comm.watchdog.host_probe`); port None: nowhere.
    reached: other host -> whether it answered when this rank last asked. leaving: it has told what it knows.
    """

    rank: int
    host: str
    pid: int
    written: float  # seconds since the epoch, by the writer's clock
    step: int | None = None
    doing: str = ""  # what its operations belong to
    groups: dict[str, GroupPosition] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    port: int | None = None
    token: str = ""
    reached: dict[str, bool] = field(default_factory=dict)
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One rank's word that the run ends: all speak, and leave together at `leave_at` (epoch)."""

    rank: int
    host: str
    written: float  # epoch
    leave_at: float
    reason: str


def position_path(directory: Path, *, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def call_path(directory: Path, *, rank: int) -> Path:
    """Present when other ranks have waited long for `rank`, which then shows its stacks."""
    return directory / f"late-{rank}"


def alarm_path(directory: Path) -> Path:
    """Touched when an operation is late: every rank then looks which hosts it reaches."""
    return directory / "late"


def ending_path(directory: Path) -> Path:
    """Present when the run ends: see `Ending`."""
    return directory / "ending.json"


def announce_ending(ending: Ending, *, directory: Path) -> Ending:
    """Make `ending` known, unless another rank was first; the one that holds."""
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
    """What was announced; None where nothing was, or only before `since` (epoch)."""
    try:
        ending = Ending(**json.loads(ending_path(directory).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return ending if ending.written >= since else None


def write_position(position: RankPosition, *, directory: Path) -> None:
    """Replace this rank's file in one step, so that nobody reads half of it."""
    path = position_path(directory, rank=position.rank)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(position)))
    os.replace(partial, path)


def read_positions(directory: Path, *, ranks: Sequence[int], since: float = 0.0) -> dict[int, RankPosition]:
    """What the ranks' files say. Left out: ranks whose file is missing, unreadable or older than `since`
    (epoch), as an earlier attempt of the run leaves them."""
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


def find_different(
    positions: Mapping[int, RankPosition],
    *,
    rank: int,
    group: str,
    sequence: int,
    signature: str,
    num_expected: int = 0,
) -> str | None:
    """What is wrong if ranks are in operation `sequence` of `group` with another signature than `rank`'s own.

    The signature of most is taken for the right one; of two as frequent, the lowest rank's, but then nothing is said
    before `num_expected` ranks are known to be there: the next one may decide it.
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
    return f"ranks came to number {sequence} of {group} with different things: " + (
        f"{', '.join(different[:8])}, where {values.count(usual)} of {len(values)} have {usual}"
    )


def _on_host(position: RankPosition | None) -> str:
    return "" if position is None else f" on {position.host}"


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
    step += f" ({position.doing})" if position.doing else ""
    for name, other in position.groups.items():
        if other.waiting_s is not None:
            return f"waits in {other.operation} number {other.sequence} of {name}{step}"
    if place.sequence == 0:
        return f"has begun no operation on it and waits in no other{step}"
    return f"is past {place.operation} number {place.sequence} of it and waits in no operation{step}"
