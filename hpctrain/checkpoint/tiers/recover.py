"""Recovery at the start of a run: copies a checkpoint that is only on the nodes to the shared folder.

`recover` copies the newest checkpoint of which every file is on some node, as the node's own or as a partner's copy, to
the shared folder and commits it there, where a load finds it. One node may be lost, and the run may have other nodes
than before.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.files.checkpoint_names import part_path
from hpctrain.checkpoint.saving.rank_file_work import flush_folder
from hpctrain.checkpoint.tiers.drain import (
    Committed,
    UnreadableError,
    commit_target,
    copy_file,
    discard_target,
    newest_sound,
    prepare_target,
)
from hpctrain.checkpoint.tiers.node_store import OWN, Held, held_under
from hpctrain.checkpoint.tiers.two_tier_save import Tiers
from hpctrain.comm import Collective, agreed, all_gather_json, doing, on_rank_0
from hpctrain.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """Result of `recover`.

    Attributes:
        path: The recovered checkpoint, now in the shared folder; None if there was no checkpoint to recover.
        step: Step of the recovered checkpoint, or None.
        notes: Messages for the user about damaged copies, and about steps that cannot be recovered because one of
            their files is lost.
    """

    path: Path | None
    step: int | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverableCheckpoint:
    """A checkpoint of which every file is on some node's own storage, so that it can be copied to the shared folder.

    `holders[f]` lists the copies of file f, the best one first, each with a rank on the node that holds the copy.
    """

    step: int
    save_id: str
    holders: tuple[tuple[tuple[int, Held], ...], ...]


def recover(tiers: Tiers, *, comm: Collective) -> Recovered:
    """Copies the newest checkpoint that is only on the nodes' storage to the shared folder. Collective.

    Call it before loading. Only checkpoints that are newer than the newest undamaged one in the shared folder, by
    step and by creation time, are considered: a node that was absent for a while may hold later steps that the run
    has since discarded. Damaged copies are skipped and listed in the notes.

    Args:
        tiers: The two locations of the run's checkpoints, node storage and shared folder.
        comm: All ranks of the run, as in `Tiers.open`.

    Returns:
        The recovered checkpoint, or None as its path, and notes for the user.

    Raises:
        CheckpointError: On every rank, if the shared folder cannot be read or written.
    """
    with doing(comm, "recovering checkpoints that the nodes hold"):
        return _recover(tiers, comm=comm)


def _recover(tiers: Tiers, *, comm: Collective) -> Recovered:
    def held_here() -> list[dict[str, Any]]:
        return [held.to_json() for held in held_under(tiers.store.base)] if tiers.is_leader else []

    by_rank = all_gather_json(comm, agreed(comm, held_here, os_error=CheckpointError))
    if not any(by_rank):
        return Recovered(path=None, step=None, notes=())
    held = [(rank, Held.from_json(entry)) for rank, entries in enumerate(by_rank) for entry in entries]
    newest = on_rank_0(comm, lambda: newest_sound(tiers.shared))
    after_step, after_unix_s = newest if newest is not None else (-1, 0.0)
    candidates, notes = plan_recovery(held, after_step=after_step, after_unix_s=after_unix_s)
    for candidate in candidates:
        path, found = _drain(candidate, tiers=tiers, comm=comm)
        notes += found
        if path is not None:
            return Recovered(path=path, step=candidate.step, notes=tuple(notes))
    return Recovered(path=None, step=None, notes=tuple(notes))


def plan_recovery(
    held: Sequence[tuple[int, Held]], *, after_step: int, after_unix_s: float
) -> tuple[list[RecoverableCheckpoint], list[str]]:
    """Finds checkpoints of which every file is on some node. Returns them, newest first, and notes for the user. Pure.

    The notes are about checkpoints of which a file is lost. Only checkpoints with a step above `after_step` that were
    saved after `after_unix_s` are considered. `held` contains the checkpoint files on all nodes, each after a rank on
    the node. Of several copies of a file, copies with a known hash are preferred to copies that were never read as a
    whole; then files that the node's ranks wrote to copies that a partner node sent; then the first in `held`.
    """
    saves: dict[tuple[int, float, str], list[tuple[int, Held]]] = {}
    for rank, entry in held:
        offer = entry.offer
        if offer.step > after_step and offer.created_unix_s > after_unix_s:
            saves.setdefault((offer.step, offer.created_unix_s, offer.save_id), []).append((rank, entry))
    candidates: list[RecoverableCheckpoint] = []
    notes: list[str] = []
    for (step, _, save_id), entries in sorted(saves.items(), reverse=True):
        num_files = max(entry.offer.num_files for _, entry in entries)
        by_file: list[list[tuple[int, Held]]] = [[] for _ in range(num_files)]
        for rank, entry in entries:
            by_file[entry.offer.file].append((rank, entry))
        missing = [number for number, holders in enumerate(by_file) if not holders]
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            notes.append(
                f"step {step} is lost: of its {num_files} files no node holds number {shown} any more, neither "
                "as its own nor as a partner's copy"
            )
            continue
        ordered = (sorted(holders, key=_preference) for holders in by_file)
        candidates.append(
            RecoverableCheckpoint(step=step, save_id=save_id, holders=tuple(map(tuple, ordered)))
        )
    return candidates, notes


def _preference(holder: tuple[int, Held]) -> tuple[bool, bool]:
    held = holder[1]
    return not held.digest, held.kind != OWN


def _drain(
    candidate: RecoverableCheckpoint, *, tiers: Tiers, comm: Collective
) -> tuple[Path | None, list[str]]:
    """Copies all files of a checkpoint from the nodes to the shared folder, and finishes it there. Collective.

    Returns the path of the finished checkpoint, or None if all copies of a file are damaged. Also returns notes for the
    user.
    """
    step = candidate.step
    partial = Path(on_rank_0(comm, lambda: str(prepare_target(tiers.shared, step=step))))
    committed = Committed(path=None)
    try:
        complete, notes = _copy_all(candidate, partial=partial, comm=comm)
        if complete:
            found = on_rank_0(
                comm, lambda: commit_target(partial, step=step, save_id=candidate.save_id).to_json()
            )
            committed = Committed.from_json(found)
            notes += [committed.reason] if committed.reason else []
        if committed.path is None:
            notes.append(f"step {step} is lost: there is no undamaged copy of one of its files")
    finally:
        if committed.path is None and comm.rank == 0:
            discard_target(partial)
    return committed.path, notes


def _copy_all(candidate: RecoverableCheckpoint, *, partial: Path, comm: Collective) -> tuple[bool, list[str]]:
    """Copies each file of a checkpoint from a node to the folder `partial`. Collective.

    If a copy on a node is damaged, the next best copy on another node is used. Returns True if all files were copied,
    and notes for the user.
    """
    tries = dict.fromkeys(range(len(candidate.holders)), 0)  # failed attempts of each remaining file
    notes: list[str] = []
    while tries:
        if any(len(candidate.holders[number]) == tried for number, tried in tries.items()):
            return False, notes
        chosen = {number: candidate.holders[number][tried] for number, tried in tries.items()}
        own = {number: held for number, (rank, held) in chosen.items() if rank == comm.rank}
        reports = all_gather_json(
            comm, agreed(comm, functools.partial(_copy_own, own, partial=partial), os_error=CheckpointError)
        )
        damaged = {int(number): reason for report in reports for number, reason in report.items()}
        notes += damaged.values()
        tries = {number: tried + 1 for number, tried in tries.items() if number in damaged}
    return True, notes


def _copy_own(own: Mapping[int, Held], *, partial: Path) -> dict[str, str]:
    """Copies files from this rank's node to the folder `partial`.

    `own` contains the files by their index in the checkpoint. Returns the error messages of damaged files, by the index
    of the file.
    """
    damaged = {}
    for number, held in own.items():
        try:
            copy_file(Path(held.path), part_path(partial, number), expected=held.digest)
        except UnreadableError as error:
            damaged[str(number)] = str(error)
    if own:
        flush_folder(partial)
    return damaged
