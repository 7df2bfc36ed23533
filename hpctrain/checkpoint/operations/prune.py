"""Deletes checkpoints on the user's command, by the same rules as a run, after verifying the newest one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first, partial_files, remove
from hpctrain.checkpoint.files.io_errors import reason_of
from hpctrain.checkpoint.operations.verify import verify
from hpctrain.checkpoint.retention.delete_old import deletable, delete_checkpoint
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.comm import Collective, on_rank_0
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """Result of `prune`.

    proven: the newest undamaged checkpoint. passed_over: errors of newer, damaged ones, which are kept. kept: names.
    deleted: names of checkpoints deleted, or with dry_run to be deleted; freed_bytes: their total length. notes:
    errors.
    """

    proven: Path
    passed_over: tuple[str, ...]
    kept: tuple[str, ...]
    deleted: tuple[str, ...]
    freed_bytes: int
    notes: tuple[str, ...]


def prune(
    directory: Path | str,
    *,
    comm: Collective,
    retention: Retention,
    unfinished: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Pruned:
    """Deletes the checkpoints of `directory` that `retention` does not keep. Collective: the ranks share the hashing.

    First every byte of the newest checkpoint is verified, or if it is damaged of the next older one, and so on. The
    verified checkpoint and all newer ones are kept.
    unfinished: also remove partial checkpoints of killed saves; do not use it while a run may be saving there.
    dry_run: delete nothing, only report. progress: as in `verify`.
    Raises CheckpointError on every rank if there is no undamaged checkpoint.
    """
    directory = Path(directory)
    proven, passed_over = _newest_whole(directory, comm=comm, progress=progress)
    outcome = on_rank_0(
        comm,
        lambda: _prune(directory, proven, retention=retention, unfinished=unfinished, dry_run=dry_run),
        os_error=CheckpointError,
    )
    return Pruned(
        proven=proven,
        passed_over=passed_over,
        kept=tuple(outcome["kept"]),
        deleted=tuple(outcome["deleted"]),
        freed_bytes=outcome["freed_bytes"],
        notes=tuple(outcome["notes"]),
    )


def checkpoint_size(path: Path) -> int:
    """Returns the length in bytes of a checkpoint's file, or of all files in its folder; 0 if it does not exist. Raises
    OSError."""
    with suppress(FileNotFoundError):
        if path.is_dir():
            return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
        return path.stat().st_size
    return 0


def _newest_whole(
    directory: Path, *, comm: Collective, progress: Callable[[int, int], None]
) -> tuple[Path, tuple[str, ...]]:
    """Returns the newest undamaged checkpoint, and the errors of newer ones. Collective. Raises CheckpointError on
    every rank if there is none."""

    def candidates() -> list[str]:
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory: give the one that holds the checkpoints")
        return [str(path) for path in finished_newest_first(directory)]

    damaged: list[str] = []
    for path in map(Path, on_rank_0(comm, candidates, os_error=CheckpointError)):
        (found,) = verify(path, comm=comm, progress=progress)
        if not found.damage:
            return path, tuple(damaged)
        damaged.append(f"{path.name}: {found.damage[0]}")
    what = f"all are damaged: {'; '.join(damaged)}" if damaged else "there is none"
    raise CheckpointError(f"no checkpoint in {directory} was deleted: {what}", agreed=True)


def _prune(
    directory: Path, proven: Path, *, retention: Retention, unfinished: bool, dry_run: bool
) -> dict[str, Any]:
    paths, notes = deletable(directory, saved=proven, retention=retention)
    rest = partial_files(directory) if unfinished else []
    deleted, freed_bytes = [], 0
    for path in [*paths, *rest]:
        try:
            num_bytes = checkpoint_size(path)
            if not dry_run and path in rest:
                remove(path)
            elif not dry_run:
                delete_checkpoint(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"could not delete {path.name}: {reason_of(error)}")
            continue
        deleted.append(path.name)
        freed_bytes += num_bytes
    kept = [path.name for path in finished_newest_first(directory) if path.name not in deleted]
    return {"kept": kept, "deleted": deleted, "freed_bytes": freed_bytes, "notes": notes}
