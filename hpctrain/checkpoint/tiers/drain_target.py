"""Creates and commits the folder in the shared directory to which a checkpoint is drained. Rank 0; not collective."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.files.checkpoint_names import (
    finished_newest_first,
    folder_name,
    partial_name,
    remove,
)
from hpctrain.checkpoint.format.commit_header import UnknownFormatError
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.saving.commit import flush_folder, make_room, rename_finished
from hpctrain.errors import CheckpointError


def prepare_target(shared: Path, *, step: int) -> Path:
    """Creates the shared folder, removes partial checkpoints of killed saves in it, and creates the folder to drain to.

    Returns the latter. Raises CheckpointError.
    """
    partial = shared / partial_name(folder_name(step), unique=secrets.token_hex(8))
    make_room(shared, partial, folder=True)
    return partial


def discard_target(partial: Path) -> None:
    """Removes a partially drained checkpoint. Ignores errors."""
    with suppress(OSError):
        remove(partial)


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """Result of `commit_target`. path: the finished checkpoint; None if the drained files are damaged, as described in
    `reason`. num_bytes: total length of its files."""

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


def commit_target(partial: Path, *, step: int, save_id: str) -> Committed:
    """Verifies the structure of the drained checkpoint and commits it by renaming it.

    Replaces a checkpoint of the same step. Raises CheckpointError if the shared folder cannot be written.
    """
    flush_folder(partial)
    try:
        structure = read_structure(partial)
        found = structure.metadata
        if (found.step, found.id) != (step, save_id):
            raise CheckpointError(
                f"it holds save {found.id} of step {found.step}, not {save_id} of step {step}"
            )
    except CheckpointError as error:
        return Committed(path=None, reason=str(error))
    final = partial.with_name(folder_name(step))
    rename_finished(partial, final, unique=secrets.token_hex(8))
    num_bytes = structure.main_bytes + sum(part.num_bytes for part in structure.metadata.parts)
    return Committed(path=final, num_bytes=num_bytes)


def newest_sound(shared: Path) -> tuple[int, float] | None:
    """Returns step and creation time (Unix, seconds) of the newest checkpoint whose structure is undamaged, or None.

    Raises CheckpointError if the folder cannot be read, and UnknownFormatError for an unknown format version.
    """
    for path in finished_newest_first(shared):
        try:
            metadata = read_structure(path).metadata
        except UnknownFormatError:
            raise
        except CheckpointError:
            continue  # the load reports it
        return metadata.step, metadata.created_unix_s
    return None
