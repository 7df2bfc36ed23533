"""The shared folder's side of draining: the place to copy to, and the commit. Rank 0 does this; not collective."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.file_bytes import explained, sync_directory
from hpctrain.checkpoint.listing import (
    file_name,
    finished_newest_first,
    folder_name,
    partial_name,
    remove,
    remove_partial_files,
    replaced_name,
)
from hpctrain.checkpoint.seal import UnknownFormatError
from hpctrain.checkpoint.structure import read_structure
from hpctrain.errors import CheckpointError


def prepare_target(shared: Path, *, step: int, as_folder: bool) -> Path:
    """Make the shared folder, remove what killed saves left in it, and make the place to drain to: a folder, or the
    name of a file. Raises CheckpointError."""
    name = folder_name(step) if as_folder else file_name(step)
    partial = shared / partial_name(name, unique=secrets.token_hex(8))
    with explained(action="write checkpoints to", path=shared):
        if not shared.is_dir():
            shared.mkdir(parents=True, exist_ok=True)
            sync_directory(shared.parent)
        remove_partial_files(shared)
        if as_folder:
            partial.mkdir()
    return partial


def discard_target(partial: Path) -> None:
    """Remove what was drained so far."""
    with suppress(OSError):
        remove(partial)


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """What `commit_target` did. path: of the finished checkpoint; None when what was drained is not sound, and
    `reason` says why. num_bytes: of all its files."""

    path: Path | None
    num_bytes: int = 0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        path = None if self.path is None else str(self.path)
        return {"path": path, "num_bytes": self.num_bytes, "reason": self.reason}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Committed:
        path = None if value["path"] is None else Path(value["path"])
        return cls(path=path, num_bytes=value["num_bytes"], reason=value["reason"])


def commit_target(partial: Path, *, step: int) -> Committed:
    """Check the structure of all that was drained to `partial`, and give it its name. The rename is the commit.

    A checkpoint of the same step that is there already is replaced. Raises CheckpointError when the shared folder
    cannot be written.
    """
    as_folder = partial.is_dir()
    if as_folder:
        with explained(action="write to disk", path=partial):
            sync_directory(partial)
    try:
        structure = read_structure(partial)
        if structure.metadata.step != step:
            raise CheckpointError(f"{partial} holds step {structure.metadata.step}, not {step}")
    except CheckpointError as error:
        return Committed(path=None, reason=str(error))
    shared = partial.parent
    final = shared / (folder_name(step) if as_folder else file_name(step))
    with explained(action="rename the finished checkpoint to", path=final):
        replaced = _move_away([shared / folder_name(step), shared / file_name(step)], keep_file=not as_folder)
        os.rename(partial, final)
    with explained(action="write to disk that the checkpoint is called", path=final):
        sync_directory(shared)
    for path in replaced:
        with suppress(OSError):  # the next save removes it
            remove(path)
    num_bytes = structure.main_bytes + sum(part.num_bytes for part in structure.metadata.parts)
    return Committed(path=final, num_bytes=num_bytes)


def _move_away(found: list[Path], *, keep_file: bool) -> list[Path]:
    """Rename what has the step already: until the new one is in place it counts under this name, see `listing`. A
    file that a file will take the place of stays: that is one rename."""
    moved = []
    for path in found:
        if path.is_dir() or (path.exists() and not keep_file):
            aside = path.with_name(replaced_name(path.name, unique=secrets.token_hex(8)))
            os.rename(path, aside)
            moved.append(aside)
    return moved


def newest_sound(shared: Path) -> tuple[int, float] | None:
    """Step and time of saving of the newest checkpoint whose structure is sound; None: there is none. Raises
    CheckpointError when the folder cannot be read, and for a format that this version does not know."""
    for path in finished_newest_first(shared):
        try:
            metadata = read_structure(path).metadata
        except UnknownFormatError:
            raise
        except CheckpointError:
            continue  # the load says so, loudly
        return metadata.step, metadata.created_unix_s
    return None
