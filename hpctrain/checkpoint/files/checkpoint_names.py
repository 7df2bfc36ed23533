"""Names of checkpoints in a directory: finished, partial, replaced. Used by rank 0; not collective.

A finished checkpoint is a file `step-00000050.h5` or a folder `step-00000050`. A partial checkpoint is one that is
being written, or was when its run was killed. A replaced checkpoint is an older one of the same step that a save
has moved aside. The names of partial and replaced checkpoints begin with a dot.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hpctrain.checkpoint.files.io_errors import reason_of
from hpctrain.errors import CheckpointError

MAIN_FILE = "data-00000.h5"
_FINISHED = re.compile(r"step-(\d{8,18})(\.h5)?")
_PARTIAL = re.compile(r"\.step-\d{8,18}(\.h5)?\.partial-[0-9a-f]{16}")
_REPLACED = re.compile(r"\.step-(\d{8,18})(?:\.h5)?\.replaced-[0-9a-f]{16}")


def file_name(step: int) -> str:
    """Returns the name of a checkpoint file, such as `step-00000050.h5`."""
    return f"{folder_name(step)}.h5"


def folder_name(step: int) -> str:
    """Returns the name of a checkpoint folder, such as `step-00000050`."""
    return f"step-{step:08d}"


def part_name(number: int) -> str:
    """Returns the name of file `number` in a checkpoint folder, such as `data-00001.h5`; number 0 is the main file."""
    return f"data-{number:05d}.h5"


def main_file(path: Path) -> Path:
    """Returns the path of the file with commit header and metadata: the checkpoint itself, or file 0 of its folder."""
    return path / MAIN_FILE if path.is_dir() else path


def part_path(path: Path, number: int) -> Path:
    """Returns the path of file `number` of the checkpoint at `path`."""
    return path / part_name(number) if number or path.is_dir() else path


def partial_name(name: str, *, unique: str) -> str:
    """Returns the name that the checkpoint `name` has while it is being written. `unique` consists of 16 hex digits."""
    return f".{name}.partial-{unique}"


def replaced_name(name: str, *, unique: str) -> str:
    """Returns the name that the checkpoint `name` has while a new checkpoint of the same step replaces it.

    `unique` consists of 16 hex digits.
    """
    return f".{name}.replaced-{unique}"


def step_of(path: Path) -> int | None:
    """Returns the step in the name of a finished or replaced checkpoint; None for any other name."""
    match = _FINISHED.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(match[1]) if match else None


def finished_newest_first(directory: Path) -> list[Path]:
    """Returns the finished checkpoints of a directory, newest first; none if the directory does not exist.

    A checkpoint that a save has moved aside to replace it is included if there is no other checkpoint of its step. That
    happens if a run is killed between the two renames of a save. Only names and file types are looked at, not contents.
    Raises CheckpointError if the directory cannot be read.
    """
    found, replaced = [], []
    for path in _entries(directory):
        if _FINISHED.fullmatch(path.name) and (path.is_file() if path.suffix else path.is_dir()):
            found.append(path)
        elif _REPLACED.fullmatch(path.name):
            replaced.append(path)
    steps = {step_of(path) for path in found}
    found += [path for path in replaced if step_of(path) not in steps]
    return sorted(found, key=lambda path: (step_of(path) or 0, path.name), reverse=True)


def partial_files(directory: Path) -> list[Path]:
    """Returns the files and folders that saves have left in a directory besides finished checkpoints.

    These are checkpoints that were being written when a run was killed, and older checkpoints that a new checkpoint of
    the same step has replaced. Raises CheckpointError if the directory cannot be read.
    """
    entries = _entries(directory)
    steps = {step_of(path) for path in entries if _FINISHED.fullmatch(path.name)}
    return sorted(
        path
        for path in entries
        if _PARTIAL.fullmatch(path.name) or (_REPLACED.fullmatch(path.name) and step_of(path) in steps)
    )


def remove_partial_files(directory: Path) -> list[str]:
    """Removes incomplete and replaced checkpoints, which saves have left in a directory (see `partial_files`).

    Returns a message for each file or folder that could not be removed. Only the run that saves to the directory may
    call this: in another run's directory, an incomplete checkpoint could belong to a save in progress. Raises
    CheckpointError if the directory cannot be read.
    """
    notes = []
    for path in partial_files(directory):
        try:
            remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:  # over NFS, for a folder with files that are still open
            notes.append(f"could not remove {path.name}, left by an earlier save: {reason_of(error)}")
    return notes


def remove(path: Path) -> None:
    """Removes a checkpoint's file or folder. Raises OSError; FileNotFoundError if it does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoint directory {directory}: {reason_of(error)}"
        ) from error
