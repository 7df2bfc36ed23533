"""Resumes a run from the newest good checkpoint of its folder, or from a given checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import is_checkpoint, load, load_newest_good
from hpctrain.comm import Collective, on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.train.state.training_state import Position, TrainingState


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """path: the checkpoint that was loaded; None if the run starts at step 0. parent: the checkpoint's step and id.
    divergence: what the run had noted of its divergence (`hpctrain.resilience.Divergence.state`). loss_unit: see
    `hpctrain.train.task.loss_weights`; None if the losses counted by samples."""

    position: Position
    path: Path | None
    parent: Mapping[str, Any] | None = None
    divergence: Mapping[str, Any] = field(default_factory=dict)
    loss_unit: float | None = None


def resume(
    state: TrainingState, *, source: Path, named: bool, comm: Collective, identity: Mapping[str, Any]
) -> Resumed:
    """Restores `state` from `source`, a checkpoint or a folder of checkpoints. Collective.

    From a folder the newest good checkpoint is loaded; newer damaged ones are reported. named: the user gave this
    source, so it is an error if it has no checkpoint; otherwise the run then starts at step 0.
    Raises CheckpointError on every rank.
    """
    regions = partial(state.regions, rank=comm.rank)
    if on_rank_0(comm, lambda: is_checkpoint(source)):
        checkpoint, tensors = load(source, comm=comm, regions=regions)
    else:
        found = load_newest_good(source, comm=comm, regions=regions)
        if found is None and named:
            raise CheckpointError(f"--resume {source}: there is no checkpoint", agreed=True)
        if found is None:
            return Resumed(position=Position(), path=None)
        checkpoint, tensors = found.checkpoint, found.tensors
    position = state.restore(checkpoint, tensors, comm=comm, identity=identity)
    parent = {"step": checkpoint.step, "id": checkpoint.metadata.id}
    return Resumed(
        position=position,
        path=checkpoint.path,
        parent=parent,
        divergence=checkpoint.document.get("divergence", {}),
        loss_unit=checkpoint.document.get("loss_unit"),
    )
