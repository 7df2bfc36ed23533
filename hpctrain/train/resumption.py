"""Where a run goes on: the newest good checkpoint of its folder, or one that is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import load, load_newest_good
from hpctrain.checkpoint.loading.check_structure import is_checkpoint
from hpctrain.comm import Collective, on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.train.state import Position, TrainingState


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """path: the checkpoint that was loaded; None: there is none, the run begins. parent: its step and id."""

    position: Position
    path: Path | None
    parent: Mapping[str, Any] | None = None


def resume(
    state: TrainingState, *, source: Path, named: bool, comm: Collective, identity: Mapping[str, Any]
) -> Resumed:
    """Restore `state` from `source`, a checkpoint or a folder of checkpoints. Collective.

    In a folder the newest good one is taken, and newer ones that are damaged are told. named: the user asked
    for this source, so it is an error when nothing is there; else the run begins at step 0.
    Raises CheckpointError on every rank.
    """
    if on_rank_0(comm, lambda: is_checkpoint(source)):
        checkpoint, tensors = load(source, comm=comm)
    else:
        found = load_newest_good(source, comm=comm)
        if found is None and named:
            raise CheckpointError(f"--resume {source}: there is no checkpoint", agreed=True)
        if found is None:
            return Resumed(position=Position(), path=None)
        checkpoint, tensors = found.checkpoint, found.tensors
    position = state.restore(checkpoint, tensors, comm=comm, identity=identity)
    parent = {"step": checkpoint.step, "id": checkpoint.metadata.id}
    return Resumed(position=position, path=checkpoint.path, parent=parent)
