"""Names of checkpoints in a directory, finished and partial. Thin I/O, done by rank 0 alone."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hpctrain.errors import CheckpointError

_FINISHED = re.compile(r"step-(\d{8,18})\.h5")
_PARTIAL = re.compile(r"\.step-\d{8,18}\.h5\.partial-[0-9a-f]{16}")


def file_name(step: int) -> str:
    """`step-00000050.h5`"""
    return f"step-{step:08d}.h5"


def partial_name(step: int, *, unique: str) -> str:
    """Name while being written. `unique`: 16 hex digits."""
    return f".{file_name(step)}.partial-{unique}"


def step_of(path: Path) -> int | None:
    """The step in a finished checkpoint's name; None for any other name."""
    match = _FINISHED.fullmatch(path.name)
    return int(match[1]) if match else None


def finished_newest_first(directory: Path) -> list[Path]:
    """Files named as finished checkpoints, by falling step. A directory that is not there holds none.

    Raises CheckpointError when the directory cannot be read.
    """
    try:
        paths = [path for path in directory.iterdir() if step_of(path) is not None and path.is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoint directory {directory}: {error.strerror}"
        ) from error
    return sorted(paths, key=lambda path: step_of(path) or 0, reverse=True)


def partial_files(directory: Path) -> list[Path]:
    """What killed runs have left behind: files with our name for a checkpoint that is being written."""
    try:
        return sorted(path for path in directory.iterdir() if _PARTIAL.fullmatch(path.name))
    except FileNotFoundError:
        return []


def remove_partial_files(directory: Path) -> list[Path]:
    """Remove them; the ones that are gone. Only whoever writes to the directory may do this: the partial
    file may be another process's save that is still going on."""
    removed = []
    for path in partial_files(directory):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(path)
    return removed
