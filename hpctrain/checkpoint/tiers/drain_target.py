"""The shared folder's side of draining: the place to copy to, and the commit. Rank 0 does this; not collective."""

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
    """Make the shared folder, remove what killed saves left in it, and make the folder to drain to. Raises
    CheckpointError."""
    partial = shared / partial_name(folder_name(step), unique=secrets.token_hex(8))
    make_room(shared, partial, folder=True)
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


def commit_target(partial: Path, *, step: int, save_id: str) -> Committed:
    """Check the structure of all that was drained to `partial`, and give it its name. The rename is the commit.

    A checkpoint of the same step that is there already is replaced. Raises CheckpointError when the shared folder
    cannot be written.
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
