"""The announcement that the run ends, by a file: of several ranks, the first one's counts."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# Time that the other ranks of a node give the one that asks whether the end has been announced.
_ANOTHER_ASKS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Announcement by `rank` that the run ends: the ranks print their reports and exit at `leave_at` (epoch)."""

    rank: int
    host: str
    written: float  # epoch
    leave_at: float
    reason: str


def ending_path(directory: Path) -> Path:
    """File that exists when the run ends: see `Ending`."""
    return directory / "ending.json"


def reported_path(directory: Path) -> Path:
    """File that exists when the announcing rank of many has printed the report for all."""
    return directory / "reported"


def take_over_path(directory: Path) -> Path:
    """File that the rank makes which reports instead of an announcing rank that has not."""
    return directory / "taken-over"


def claim(path: Path) -> bool:
    """Makes an empty file; returns False if it exists: of several callers, one gets True. Raises OSError."""
    try:
        path.open("xb").close()
    except FileExistsError:
        return False
    return True


def announce_ending(ending: Ending, *, directory: Path) -> Ending:
    """Publishes `ending` unless another rank was first. Returns the one that was published. Raises OSError."""
    if (found := read_ending(directory)) is not None:
        return found  # of N ranks whose limits end at the same time, few make a file
    text = json.dumps(asdict(ending))
    partial = directory / f"ending-{ending.rank}.partial"
    partial.write_text(text)
    try:
        os.link(partial, ending_path(directory))  # unlike a rename, it replaces nothing
    except FileExistsError:
        return read_ending(directory) or ending
    except OSError:  # some filesystems have no hard links
        return _announce_without_link(text, directory=directory) or ending
    finally:
        partial.unlink(missing_ok=True)
    return ending


def announce_from_node(ending: Ending, *, shared: Path, local: Path, after_s: float = 0.0) -> Ending:
    """As `announce_ending` in `shared`, for which one of a node's ranks asks; the others find the answer in `local`.

    C nodes make at most C files in `shared`, whatever the number of ranks. after_s: waits so long for another node's
    announcement, which the leader brings to `local`. Raises OSError.
    """
    found = wait_for_ending(local, within_s=after_s)
    if found is None and not claim(local / "announcing"):
        found = wait_for_ending(local, within_s=_ANOTHER_ASKS_S)
    if found is None:  # also if the rank that asks does not come back
        found = announce_ending(ending, directory=shared)
        announce_ending(found, directory=local)
    return found


def _announce_without_link(text: str, *, directory: Path) -> Ending | None:
    """As `announce_ending`; for a moment the file is there and empty. Returns None if it stays so."""
    with contextlib.suppress(FileExistsError), ending_path(directory).open("x") as file:
        file.write(text)
    return wait_for_ending(directory, within_s=1.0)


def wait_for_ending(directory: Path, *, within_s: float, since: float = 0.0) -> Ending | None:
    """As `read_ending`, but returns None only after `within_s`."""
    until = time.monotonic() + within_s
    while (found := read_ending(directory, since=since)) is None and time.monotonic() < until:
        time.sleep(0.05)
    return found


def read_ending(directory: Path, *, since: float = 0.0) -> Ending | None:
    """Returns the announcement; None if there is none, or it is older than `since` (epoch)."""
    try:
        ending = Ending(**json.loads(ending_path(directory).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return ending if ending.written >= since else None


def forget_endings(directory: Path, *, since: float) -> None:
    """Removes what an attempt before `since` (epoch) announced, which would prevent a new announcement.

    Raises OSError.
    """
    if read_ending(directory, since=since) is None:
        for path in (ending_path, reported_path, take_over_path):
            path(directory).unlink(missing_ok=True)
