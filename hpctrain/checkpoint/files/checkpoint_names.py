"""Names of checkpoints in a directory: finished, being written, replaced, spare. Thin I/O, done by rank 0 alone.

A checkpoint is a file `step-00000050.h5` or a folder `step-00000050`. What is not finished, or no longer counts,
has a name that begins with a dot.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hpctrain.checkpoint.files.full_io import reason_of
from hpctrain.errors import CheckpointError

MAIN_FILE = "data-00000.h5"
_FINISHED = re.compile(r"step-(\d{8,18})(\.h5)?")
_PARTIAL = re.compile(r"\.step-\d{8,18}(\.h5)?\.partial-[0-9a-f]{16}")
_REPLACED = re.compile(r"\.step-(\d{8,18})(?:\.h5)?\.replaced-[0-9a-f]{16}")
_SPARE = re.compile(r"\.step-\d{8,18}\.h5\.spare-[0-9a-f]{16}")


def file_name(step: int) -> str:
    """`step-00000050.h5`"""
    return f"{folder_name(step)}.h5"


def folder_name(step: int) -> str:
    """`step-00000050`"""
    return f"step-{step:08d}"


def part_name(number: int) -> str:
    """`data-00001.h5`: a file of a folder; number 0 is the main one."""
    return f"data-{number:05d}.h5"


def main_file(path: Path) -> Path:
    """The file that holds seal and metadata: the checkpoint itself, or file number 0 of its folder."""
    return path / MAIN_FILE if path.is_dir() else path


def part_path(path: Path, number: int) -> Path:
    """File `number` of the checkpoint at `path`."""
    return path / part_name(number) if number or path.is_dir() else path


def partial_name(name: str, *, unique: str) -> str:
    """What the checkpoint `name` is called while it is written. unique: 16 hex digits."""
    return f".{name}.partial-{unique}"


def replaced_name(name: str, *, unique: str) -> str:
    """What the checkpoint `name` is called while another of its step takes its place. unique: 16 hex digits."""
    return f".{name}.replaced-{unique}"


def spare_name(name: str, *, unique: str) -> str:
    """What the file of the checkpoint `name` is called once only its room is of use. unique: 16 hex digits."""
    return f".{name}.spare-{unique}"


def is_spare(path: Path) -> bool:
    """Whether this is the name of a file whose content counts no longer, and whose room is kept for the next save."""
    return _SPARE.fullmatch(path.name) is not None


def step_of(path: Path) -> int | None:
    """The step in a finished checkpoint's name, or a replaced one's; None for any other name."""
    match = _FINISHED.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(match[1]) if match else None


def finished_newest_first(directory: Path) -> list[Path]:
    """Files and folders named as finished checkpoints, by falling step. A directory that is not there holds none.

    One that was being replaced counts where its step has no other: the run was killed between two renames.
    Raises CheckpointError when the directory cannot be read.
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
    """What no longer or not yet counts: files and folders with our name for a checkpoint being written, replaced ones
    whose place is taken, and spare ones."""
    entries = _entries(directory)
    steps = {step_of(path) for path in entries if _FINISHED.fullmatch(path.name)}
    return sorted(
        path
        for path in entries
        if _PARTIAL.fullmatch(path.name)
        or is_spare(path)
        or (_REPLACED.fullmatch(path.name) and step_of(path) in steps)
    )


def remove_partial_files(directory: Path, *, but: Path | None = None) -> list[str]:
    """Remove them, all but one; what could not be removed, in words. Only whoever writes to the directory may do this:
    the partial file may be another process's save that is still going on."""
    notes = []
    for path in partial_files(directory):
        if path == but:
            continue
        try:
            remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:  # over NFS, one whose files somebody still has open
            notes.append(f"could not remove {path.name}, which an earlier save has left: {reason_of(error)}")
    return notes


def remove(path: Path) -> None:
    """Remove a checkpoint's file or folder. Raises OSError, FileNotFoundError when there is none."""
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
