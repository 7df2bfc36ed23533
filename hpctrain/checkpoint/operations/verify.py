"""Verifies every byte of checkpoints by hashing: the command `hpctrain checkpoint verify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.files.checkpoint_names import finished_newest_first
from hpctrain.checkpoint.loading.check_structure import is_checkpoint, read_structure
from hpctrain.checkpoint.loading.checkpoint import from_rank_0
from hpctrain.checkpoint.loading.open_files import ContentFiles
from hpctrain.checkpoint.loading.verified_content import find_damage
from hpctrain.comm import Collective, agreed, all_gather_json, doing, on_rank_0
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Result for one checkpoint. path: its file or folder. file_bytes: total length of its files. damage: one line per
    damaged extent or file; empty if every byte is as it was written."""

    path: Path
    file_bytes: int
    damage: tuple[str, ...]


def verify(
    path_or_directory: Path | str,
    *,
    comm: Collective,
    progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> list[Verified]:
    """Verifies one checkpoint, or all checkpoints of a directory, newest first. Collective: the ranks share the work.

    progress: called with the bytes hashed so far and the (approximate) total of this rank's share of one checkpoint.
    Returns damage, does not raise for it. Raises CheckpointError on every rank if there is no checkpoint.
    """
    paths = on_rank_0(comm, lambda: _find(Path(path_or_directory)))
    return [_verify_file(Path(path), comm=comm, progress=progress) for path in paths]


def _find(path: Path) -> list[str]:
    if not path.exists():
        raise CheckpointError(f"there is no {path}")
    is_directory = path.is_dir() and not is_checkpoint(path)
    paths = finished_newest_first(path) if is_directory else [path]
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return [str(found) for found in paths]


def _verify_file(path: Path, *, comm: Collective, progress: Callable[[int, int], None]) -> Verified:
    try:
        checkpoint = from_rank_0(comm, lambda: read_structure(path))
    except CheckpointError as error:
        found_bytes = on_rank_0(comm, lambda: _bytes_found(path))
        return Verified(path=path, file_bytes=found_bytes, damage=(str(error),))

    def own_part() -> list[str]:
        tensors = list(checkpoint.tensors.values())
        with checkpoint.named(), ContentFiles(checkpoint.files) as files:
            share_bytes = sum(tensor.num_bytes for tensor in tensors) // comm.num_ranks
            found = find_damage(
                files, tensors=tensors, rank=comm.rank, num_ranks=comm.num_ranks,
                progress=lambda done_bytes: progress(min(done_bytes, share_bytes), share_bytes),
            )  # fmt: skip
            return [str(damage) for damage in found]

    with doing(comm, f"verifying checkpoint {path}"):
        by_rank = all_gather_json(comm, agreed(comm, own_part))
    damage = tuple(sorted(line for lines in by_rank for line in lines))
    return Verified(path=path, file_bytes=checkpoint.file_bytes, damage=damage)


def _bytes_found(path: Path) -> int:
    """Returns the total length in bytes of the files of a checkpoint whose structure is damaged."""
    files = [path] if path.is_file() else path.glob("data-*.h5")
    return sum(file.stat().st_size for file in files if file.is_file())
