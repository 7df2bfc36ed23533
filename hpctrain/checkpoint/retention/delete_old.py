"""Deletes checkpoints that are no longer kept, after a new checkpoint was committed. One rank does this."""

from __future__ import annotations

import os
import secrets
import shutil
from functools import lru_cache
from pathlib import Path

from hpctrain.checkpoint.files.checkpoint_names import (
    finished_newest_first,
    folder_name,
    main_file,
    partial_name,
    step_of,
)
from hpctrain.checkpoint.loading.check_structure import read_structure
from hpctrain.checkpoint.retention.policy import Best, Retention, steps_to_delete
from hpctrain.errors import HpctrainError
from hpctrain.storage import sync_directory


def retain(directory: Path, *, saved: Path, retention: Retention) -> list[str]:
    """Deletes the checkpoints of `directory` that `retention` does not keep. Not collective.

    `saved` is the path of the new checkpoint, which is finished. Errors are returned as text, since they must not fail
    the save.
    """
    paths, notes = deletable(directory, saved=saved, retention=retention)
    for path in paths:
        try:
            delete_checkpoint(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"could not delete {path.name}: {error.strerror or error}")
    return notes


def deletable(directory: Path, *, saved: Path, retention: Retention) -> tuple[list[Path], list[str]]:
    """Returns the checkpoints of `directory` that `retention` does not keep, oldest first, and notes for the user.

    `saved` is the path of the new checkpoint, which is kept. With `retention.best`, a checkpoint whose metric cannot be
    read is kept, since it might be the best one.
    """
    try:
        paths = finished_newest_first(directory)
    except HpctrainError as error:
        return [], [f"older checkpoints were kept: {error}"]
    notes: list[str] = []
    by_step: dict[int, list[Path]] = {}  # a save killed while replacing may have left two of one step
    for path in paths:
        by_step.setdefault(step_of(path) or 0, []).append(path)
    newest = step_of(saved) or 0
    to_delete = steps_to_delete(by_step, saved=newest, keep=retention)
    if to_delete and retention.best is not None:
        quality, unknown = _quality(by_step, best=retention.best, saved=newest, notes=notes)
        to_delete = steps_to_delete(by_step, saved=newest, keep=retention, quality=quality)
        to_delete = [step for step in to_delete if step not in unknown]
    return [path for step in to_delete for path in by_step[step]], notes


def delete_checkpoint(path: Path) -> None:
    """Deletes a finished checkpoint, a file or a folder. Raises OSError, except for a file that does not exist.

    A folder is first renamed to the name of an incomplete checkpoint. So a partly deleted folder is never taken for a
    checkpoint, and the next save removes the rest.
    """
    if path.is_symlink() or not path.is_dir():  # of a symbolic link, delete only the link
        path.unlink(missing_ok=True)
        return
    name = folder_name(step_of(path) or 0)  # `path` may also have the name of a replaced checkpoint
    doomed = path.with_name(partial_name(name, unique=secrets.token_hex(8)))
    os.rename(path, doomed)
    sync_directory(path.parent)
    shutil.rmtree(doomed)


def _quality(
    by_step: dict[int, list[Path]], *, best: Best, saved: int, notes: list[str]
) -> tuple[dict[int, float], set[int]]:
    """Returns two results: the value of the metric `best` by step, and the steps whose checkpoint cannot be read.

    `by_step` contains the paths of the checkpoints. Steps after `saved` are ignored. Errors are appended to `notes`.
    """
    quality: dict[int, float] = {}
    unknown: set[int] = set()
    for step, paths in by_step.items():
        if step > saved:
            continue
        try:
            status = main_file(paths[0]).stat()
            found = _numbers(paths[0], status.st_mtime_ns, status.st_size).get(best.metric)
        except (HpctrainError, OSError, OverflowError) as error:
            unknown.add(step)
            notes.append(f"kept {paths[0].name}, whose {best.metric} cannot be read: {error}")
            continue
        if found is not None:
            quality[step] = found
    if not quality and not unknown:
        notes.append(f"no checkpoint has the metric {best.metric!r} yet, so none is kept for being the best")
    return quality, unknown


@lru_cache(maxsize=1024)
def _numbers(path: Path, mtime_ns: int, file_bytes: int) -> dict[str, float]:
    """Returns the numbers in the entry `quality` of a checkpoint's document.

    The result is cached, since each save needs the numbers of all checkpoints.
    """
    quality = read_structure(path).metadata.document.get("quality")
    if not isinstance(quality, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in quality.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
