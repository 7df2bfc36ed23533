"""The identity of a run: what connects its directory with checkpoints that its nodes keep elsewhere.

The file `run-id` in the run directory has the identity and, in a second line, where the directory was. A directory that
is removed takes its identity along, one that is moved keeps it, and a copy gets another.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.tiers.node_store import run_key
from hpctrain.comm import Collective, on_rank_0
from hpctrain.errors import LaunchError
from hpctrain.storage import replace_file

RUN_ID = "run-id"
_VALID = re.compile(r"[A-Za-z0-9_-]{1,100}")
# What earlier versions, which wrote no identity, have left in the directory of a run that had begun.
_OF_A_RUN = ("starts.jsonl", "recipe.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """id: the name of the run's folder on node storage. is_new: the run directory had none before this start."""

    id: str
    is_new: bool


def identify_run(directory: Path, *, checkpoints: Path, comm: Collective) -> RunIdentity:
    """Returns the identity of the run in `directory`, which exists, and gives it one if it has none. Collective.

    checkpoints: where it saves; runs of earlier versions are identified by its path. Raises LaunchError on every rank
    if the file cannot be read or written.
    """
    found = on_rank_0(comm, lambda: _identify(directory, checkpoints=checkpoints))
    return RunIdentity(id=found[0], is_new=found[1])


def _identify(directory: Path, *, checkpoints: Path) -> tuple[str, bool]:
    path = directory / RUN_ID
    here = os.path.realpath(directory)
    found = _read(path)
    if found is not None:
        known, where = found
        if where == here:
            return known, False
        if not _is_copied(known, where=where, directory=directory):
            _write(path, known, here=here)
            return known, False
    elif any((directory / name).exists() for name in _OF_A_RUN):
        known = run_key(checkpoints)
        _write(path, known, here=here)
        return known, False
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(here).name).strip("-")[:60] or "run"
    new = f"{label}-{secrets.token_hex(8)}"
    _write(path, new, here=here)
    return new, True


def _is_copied(known: str, *, where: str, directory: Path) -> bool:
    """True if the directory at `where` has the same identity and is another one."""
    if not where:
        return False
    try:
        other = _read(Path(where) / RUN_ID)
        return other is not None and other[0] == known and not os.path.samefile(where, directory)
    except (OSError, LaunchError):
        return False


def _read(path: Path) -> tuple[str, str] | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LaunchError(f"{path}, which holds the run's identity, cannot be read: {error}") from error
    known = lines[0].strip() if lines else ""
    if not _VALID.fullmatch(known):
        raise LaunchError(
            f"{path} must hold the run's identity in its first line, letters, digits, - and _, and has {known!r:.60}: "
            "delete it for a new identity; checkpoints that only nodes hold are then not recovered"
        )
    return known, lines[1].strip() if len(lines) > 1 else ""


def _write(path: Path, known: str, *, here: str) -> None:
    try:
        replace_file(
            path, f"{known}\n{here}\n".encode(), partial=path.with_name(f".{RUN_ID}.{secrets.token_hex(8)}")
        )
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}") from error
