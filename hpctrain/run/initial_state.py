"""Sets the initial state of a run: from its own checkpoints, shared or on the nodes, or from other weights."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint import (
    RUN_ID,
    RunIdentity,
    Tiers,
    finished_newest_first,
    load_weights,
    recover,
    step_of,
)
from hpctrain.comm import on_rank_0
from hpctrain.errors import CheckpointError
from hpctrain.resilience import ELASTIC_VARIABLE, StopRequest
from hpctrain.run.build import checkpoint_directory
from hpctrain.run.directory import set_aside_newer
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.session import Session
from hpctrain.telemetry import tell
from hpctrain.train import Position, Resumed, StateKeeper, TrainingState, resume, why_not_kept


def open_tiers(recipe: Recipe, *, session: Session, run: RunIdentity) -> Tiers | None:
    """Opens the nodes' own storage for checkpoints. Collective.

    Returns None if `checkpoint.local` is not set, and the run is not elastic. In an elastic run without
    `checkpoint.local`, the storage is a folder in the nodes' memory, for the state that ranks keep after a loss.

    The storage is closed with the session. If the run is new and the nodes hold checkpoints of an earlier run in the
    same run directory, these checkpoints stay where they are, and a printed line says how to use them.
    """
    section = recipe.checkpoint
    local = section.local
    if local is None:
        if not is_elastic():
            return None
        local = str(session.agreed(_folder_in_memory, os_error=CheckpointError))
    tiers = Tiers.open(
        local=local,
        shared=checkpoint_directory(recipe),
        topology=session.topology,
        comm=session.world,
        keep_local=section.local_keep,
        run=run.id,
        partners=section.local is not None,
    )
    session.on_close(tiers.close)
    if run.is_new and section.local is not None:
        for other in tiers.left_by_others(comm=session.world):
            if session.rank == 0:
                name, path = other.split()[0], Path(recipe.run.directory) / RUN_ID
                tell(
                    f"note: the nodes' storage {section.local} holds checkpoints of an earlier run in this directory: "
                    f"{other}. This directory is new, so they are not recovered. To resume that run instead, stop this "
                    f"one, empty the directory, and write the name into it: echo {name} > {path}. To free the space, "
                    f"delete {Path(section.local) / name} on the nodes"
                )
    return tiers


def is_elastic() -> bool:
    """Returns True if the supervisor of this run may change its number of ranks."""
    return bool(os.environ.get(ELASTIC_VARIABLE))


def _folder_in_memory() -> Path:
    """Creates the folder for the state that ranks keep. Raises CheckpointError if it is another user's."""
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    folder = parent / f"hpctrain-kept-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CheckpointError(
            f"{folder}, where an elastic run keeps its state after a loss, is not a directory that only this user can "
            "write to: remove it, or set checkpoint.local to another folder"
        )
    return folder


def open_keeper(
    state: TrainingState, *, tiers: Tiers | None, session: Session, stop: StopRequest
) -> StateKeeper | None:
    """Returns what keeps the state after a loss in an elastic run; None in other runs. Collective.

    If single ranks cannot keep the state of this run, a line says so, and the result is None.
    """
    if tiers is None or not is_elastic():
        return None
    why_not = why_not_kept(state)
    if why_not is not None:
        if session.rank == 0:
            tell(f"after a lost rank or node this run continues from its newest checkpoint, since {why_not}")
        return None
    return StateKeeper.open(
        state, store=tiers.store, comm=session.world, topology=session.topology, stop=stop
    )


def resume_run(
    recipe: Recipe,
    state: TrainingState,
    *,
    path: Path | None,
    from_scratch: bool,
    session: Session,
    identity: dict[str, Any],
    tiers: Tiers | None,
) -> Resumed:
    """Restores `state` from the checkpoint at `path`, or from the run's newest undamaged checkpoint. Collective.

    from_scratch: True to restore nothing, so that the run starts from scratch.

    Raises CheckpointError on every rank if the checkpoint cannot be restored.
    """
    if from_scratch:
        if tiers is not None:
            tiers.forget(comm=session.world)
        return Resumed(position=Position(), path=None)
    directory = checkpoint_directory(recipe)
    if tiers is not None and path is None:
        recover_from_nodes(tiers, session=session)
    resumed = resume(
        state, source=path or directory, named=path is not None, comm=session.world, identity=identity
    )
    if path is not None:
        # The run branches off here: later checkpoints of the other branch must not be mistaken for this run's.
        moved = set_aside_newer(directory, step=resumed.position.step, comm=session.world)
        if tiers is not None:
            tiers.forget(from_step=resumed.position.step + 1, comm=session.world)
        if moved is not None and session.rank == 0:
            tell(f"later checkpoints, of the run from which this one branches off, were moved to {moved}")
    if resumed.path is not None and session.rank == 0:
        tell(f"resumed from {resumed.path} (step {resumed.position.step})")
    return resumed


def roll_back_run(
    recipe: Recipe,
    state: TrainingState,
    *,
    choose: Callable[[list[int]], int | None],
    session: Session,
    identity: dict[str, Any],
    tiers: Tiers | None,
    say: Callable[[str], None],
) -> Resumed | None:
    """Restores `state` from the run's checkpoint of the step that `choose` returns. Collective.

    Checkpoints of later steps are moved away. If the chosen checkpoint is damaged, the next older checkpoint is
    restored.
    choose: a function that takes the steps of all checkpoints, newest first, and returns one of these steps or None. If
    the function returns None, nothing is changed and the result is None.

    Raises CheckpointError on every rank if no checkpoint is undamaged.
    """
    directory = checkpoint_directory(recipe)
    saved = on_rank_0(session.world, lambda: [step_of(path) for path in finished_newest_first(directory)])
    step = choose(saved)
    if step is None:
        return None
    moved = set_aside_newer(directory, step=step, comm=session.world)
    if tiers is not None:
        tiers.forget(from_step=step + 1, comm=session.world)
    resumed = resume(state, source=directory, named=False, comm=session.world, identity=identity)
    if moved is not None:
        say(f"later checkpoints, which may contain the divergence, are in {moved}")
    return resumed


def recover_from_nodes(tiers: Tiers, *, session: Session) -> None:
    """Copies checkpoints that exist only on the nodes' storage into the shared folder. Collective."""
    found = recover(tiers, comm=session.world)
    if session.rank == 0:
        for note in found.notes:
            tell(f"note: {note}")
        if found.path is not None:
            tell(f"recovered from the nodes' own storage: {found.path}")


def start_from_weights(recipe: Recipe, model: torch.nn.Module, *, session: Session) -> None:
    """Loads the weights of `checkpoint.weights_from`, if set, into `model`. Prints what did not fit. Collective.

    Raises CheckpointError on every rank if the weights cannot be loaded.
    """
    section = recipe.checkpoint
    if section.weights_from is None:
        return
    mapping = section.weights_map
    loaded = load_weights(
        model,
        section.weights_from,
        comm=session.world,
        rename=lambda name: renamed(name, mapping=mapping),
        strict=section.weights_strict,
    )
    if session.rank == 0:
        tell(f"starts from the weights of {loaded.describe()}")


def renamed(name: str, *, mapping: Mapping[str, str]) -> str:
    """Returns `name` with its longest prefix that is a key of `mapping` replaced by the value of that key."""
    fitting = [begin for begin in mapping if name.startswith(begin)]
    if not fitting:
        return name
    begin = max(fitting, key=len)
    return mapping[begin] + name[len(begin) :]
