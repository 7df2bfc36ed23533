"""Prepares the run directory: rank 0 creates it, all ranks check it, and earlier files are moved, never overwritten."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from hpctrain.checkpoint import step_of
from hpctrain.comm import VISIBLE_WITHIN_S, Collective, agreed, is_seen, on_rank_0
from hpctrain.errors import LaunchError
from hpctrain.storage import InUseError, take_lease
from hpctrain.telemetry import tell


def prepare_run_directory(directory: Path, *, comm: Collective, checks: bool) -> None:
    """Creates `directory`, and checks that the ranks see it and can write to it. Collective.

    checks: whether this rank checks; one rank per node suffices.

    Raises LaunchError on every rank if a check fails.
    """
    token = on_rank_0(comm, lambda: _create(directory))
    agreed(comm, lambda: _check(directory, token, rank=comm.rank) if checks else None)
    comm.barrier()
    if comm.rank == 0:
        (directory / token).unlink(missing_ok=True)


def claim_run_directory(directory: Path, *, comm: Collective) -> None:
    """Locks the run directory for this run, by a lease that rank 0's process holds. Collective.

    Raises LaunchError on every rank, naming the other process, if another run uses the directory.
    """

    def take() -> None:
        try:
            take_lease(directory, say=tell)
        except InUseError as error:
            raise LaunchError(f"run.directory: {error}") from error
        except OSError as error:
            raise LaunchError(
                f"the run directory {directory.absolute()} cannot be written: {error.strerror}"
            ) from error

    on_rank_0(comm, take)


def set_aside(directory: Path, names: list[str], *, comm: Collective) -> Path | None:
    """Moves the existing files `names` of `directory` into the new folder `directory/previous-N`. Collective.

    Returns that folder; None if no file of these names exists.
    """

    def move() -> str | None:
        return _move(directory, [directory / name for name in names if (directory / name).exists()])

    moved = on_rank_0(comm, move)
    return Path(moved) if moved is not None else None


def set_aside_newer(checkpoints: Path, *, step: int, comm: Collective) -> Path | None:
    """Moves checkpoints of steps after `step` into the new folder `previous-N` next to `checkpoints`. Collective.

    Returns the new folder; None if there are no such checkpoints.
    """

    def move() -> str | None:
        steps = {path: step_of(path) for path in checkpoints.glob("*")}
        return _move(checkpoints.parent, [path for path, s in steps.items() if s is not None and s > step])

    moved = on_rank_0(comm, move)
    return Path(moved) if moved is not None else None


def _move(directory: Path, found: list[Path]) -> str | None:
    if not found:
        return None
    number = 1
    while (directory / f"previous-{number}").exists():
        number += 1
    target = directory / f"previous-{number}"
    target.mkdir()
    for path in found:
        os.replace(path, target / path.name)
    return str(target)


def _create(directory: Path) -> str:
    token = f".started-{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / token).write_text("")
    except OSError as error:
        raise LaunchError(
            f"the run directory {directory.absolute()} cannot be written ({error.strerror}): set run.directory to a "
            "folder on a shared filesystem where this user may write"
        ) from error
    return token


def _check(directory: Path, token: str, *, rank: int) -> None:
    if not is_seen(directory / token):
        raise LaunchError(
            f"the run directory {directory.absolute()} that rank 0 made is not visible here after "
            f"{VISIBLE_WITHIN_S:.0f} s: set run.directory to a folder that all nodes share"
        )
    mine = directory / f"{token}.{rank}"
    try:
        mine.write_text("")
        mine.unlink()
    except OSError as error:
        raise LaunchError(
            f"the run directory {directory.absolute()} cannot be written: {error.strerror}"
        ) from error
