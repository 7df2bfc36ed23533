"""Deleting checkpoints by hand: by the rules that a run keeps, and not before the newest is proven."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first, partial_files, remove
from hpctrain.checkpoint.files.full_io import reason_of
from hpctrain.checkpoint.operations.verify import verify
from hpctrain.checkpoint.retention.delete_old import deletable, delete_checkpoint
from hpctrain.checkpoint.retention.policy import Retention
from hpctrain.comm.collectives.agreement import on_rank_0
from hpctrain.comm.interface.communicator import Collective
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """proven: the newest sound checkpoint, because of which the older ones may go. passed_over: newer ones that are
    damaged, which stay. deleted: by name, also when they would only be; freed_bytes: theirs. notes: what went wrong."""

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
    """Delete the checkpoints of `directory` that `retention` does not keep. Collective: the ranks prove together.

    The newest checkpoint is proven by hashing every byte of it; when it is damaged the one before is, and so on.
    Nothing is deleted before one is proven, and it always stays, like all newer ones. unfinished: remove also what
    killed saves have left; not while a run may be saving there. dry_run: say what would be deleted, and delete
    nothing. progress: as of `verify`.
    Raises CheckpointError on every rank when there is no checkpoint that is whole.
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


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's file, or of the files in its folder; 0 when it is gone. OSError."""
    with suppress(FileNotFoundError):
        if path.is_dir():
            return sum(entry.stat().st_size for entry in path.iterdir() if entry.is_file())
        return path.stat().st_size
    return 0


def _newest_whole(
    directory: Path, *, comm: Collective, progress: Callable[[int, int], None]
) -> tuple[Path, tuple[str, ...]]:
    """The newest checkpoint that verifies, and what is wrong with the newer ones. Collective."""

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
    what = f"none is whole: {'; '.join(damaged)}" if damaged else "there is none"
    raise CheckpointError(f"no checkpoint in {directory} was deleted: {what}", agreed=True)


def _prune(
    directory: Path, proven: Path, *, retention: Retention, unfinished: bool, dry_run: bool
) -> dict[str, Any]:
    paths, notes = deletable(directory, saved=proven, retention=retention)
    rest = partial_files(directory) if unfinished else []
    deleted, freed_bytes = [], 0
    for path in [*paths, *rest]:
        try:
            num_bytes = size_of(path)
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
