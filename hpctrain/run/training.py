"""Runs the training that a recipe describes."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import Begin, SaveRequests, Tiers, saving_through
from hpctrain.comm import check_same, make_shared_folder, on_rank_0
from hpctrain.data import Dataset
from hpctrain.errors import DivergedError, LaunchError, RecipeError, StoppedEarly
from hpctrain.launch import identify
from hpctrain.resilience import SaveSignal, StopRequest
from hpctrain.run.build import (
    build_parts,
    build_schedule,
    build_settings,
    reduction_plan,
    total_steps,
)
from hpctrain.run.compute.postponed_dynamo import set_deterministic
from hpctrain.run.compute.precision import MODEL_DTYPE, loss_scale_for
from hpctrain.run.data import open_data
from hpctrain.run.directory import prepare_run_directory, set_aside
from hpctrain.run.initial_state import open_tiers, resume_run, start_from_weights
from hpctrain.run.recipe.load import to_toml
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.record import environment_record, working_commit
from hpctrain.run.reduction import Reduction, gradient_bytes
from hpctrain.run.session import Session, start
from hpctrain.run.summary import SUMMARY, finished_summary, summarize
from hpctrain.telemetry import RecordWriter, tell, write_json
from hpctrain.train import (
    Checkpointing,
    LoopSettings,
    RunRecorder,
    Task,
    TaskRunner,
    Training,
    TrainingState,
    data_identity,
    derive_seed,
    import_task,
    seed_generators,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Value of `--resume`. path: checkpoint to resume from. anew: start from scratch. Neither: newest checkpoint."""

    path: Path | None = None
    anew: bool = False

    @classmethod
    def parse(cls, text: str) -> Resume:
        """Parses `auto`, `never`, or the path of a checkpoint."""
        if text in ("auto", "never"):
            return cls(anew=text == "never")
        return cls(path=Path(text))


def train(
    recipe: Recipe,
    *,
    recipe_path: Path,
    resume: Resume,
    stop: StopRequest,
    save_signal: SaveSignal | None = None,
) -> dict[str, Any]:
    """Trains as `recipe` says, with the ranks that the launcher started. Collective. Returns the summary.

    Raises StoppedEarly, with the state saved, if a rank was asked to stop.
    """
    search = [Path.cwd(), recipe_path.absolute().parent]
    # Before anything communicates, since every rank finds the same mistakes in the recipe.
    task = import_task(recipe.task.target, options=recipe.task.options, search=search)
    # Also before, since it runs git, and forking is unsafe once MPI has started.
    first = identify(os.environ, socket.gethostname()).rank == 0
    commit = working_commit() if first else None
    with start(
        backend=recipe.run.backend,
        device=recipe.run.device,
        ranks=recipe.run.ranks,
        threads_per_rank=recipe.run.threads_per_rank,
        timeout_s=recipe.run.timeout_s,
        algorithm=recipe.reduction.algorithm,
    ) as session:
        return carry_out(
            recipe, task, session=session, resume=resume, stop=stop, commit=commit, save_signal=save_signal
        )


def carry_out(
    recipe: Recipe,
    task: Task,
    *,
    session: Session,
    resume: Resume,
    stop: StopRequest,
    commit: str | None = None,
    save_signal: SaveSignal | None = None,
) -> dict[str, Any]:
    """Trains `task` as `recipe` says, with the ranks of an open session. Collective. Returns the summary.

    commit: commit of the user's working directory, for the record; rank 0's is written.
    save_signal: requests a checkpoint, as does the file `save-now` in the run directory.
    """
    started = time.time()
    directory = Path(recipe.run.directory)
    _check_same_recipe(recipe, session)
    prepare_run_directory(directory, comm=session.world, checks=session.leads_node)
    session.world.publish_in(directory / "watch")
    if resume.anew:
        _start_anew(recipe, session)
    data = open_data(recipe.data, session=session)
    if recipe.run.deterministic:
        set_deterministic()
    parts = session.agreed(
        lambda: build_parts(recipe, task, session=session, data=data),
        os_error=RecipeError,
    )
    reduction = session.reductions.make(reduction_plan(recipe), gradient_bytes=gradient_bytes(parts.model))
    environment = {
        **environment_record(session, commit=commit),
        "algorithm": reduction.algorithm,
        "wire": reduction.wire,
        "reduction": reduction.record,
    }
    if recipe.reduction.sync_batch_norm:
        # The optimizer already refers to the parameters, which the conversion keeps.
        parts = replace(parts, model=session.sync_batch_norm(parts.model))
    _tell_start(recipe, session, reduction=reduction, dataset=data.dataset)
    updater = session.updater(
        parts.model,
        parts.optimizer,
        reduction=reduction,
        loss_scale=loss_scale_for(
            recipe.run.precision, wire=reduction.wire, max_skipped_in_row=recipe.optimizer.max_skipped_in_row
        ),
        clip_norm=recipe.optimizer.clip_norm,
    )
    seed_generators(derive_seed(recipe.run.seed, "rank", session.rank))
    state = TrainingState(parts.model, parts.optimizer, updater, recipe.run.seed)
    identity = data_identity(parts.loader, fingerprint=data.dataset.manifest.fingerprint)
    make_shared_folder(directory / "metrics", comm=session.world)
    records = session.agreed(
        lambda: RecordWriter(directory / "metrics" / f"rank-{session.rank:05}.jsonl"), os_error=LaunchError
    )
    tiers: Tiers | None = None
    try:
        tiers = open_tiers(recipe, session=session)
        resumed = resume_run(
            recipe, state, path=resume.path, anew=resume.anew, session=session, identity=identity, tiers=tiers
        )
        if resumed.path is None:
            start_from_weights(recipe, parts.model, session=session)
        steps = total_steps(recipe, parts.loader, position=resumed.position)
        if resumed.path is not None and resumed.position.step >= steps:
            before = on_rank_0(session.world, lambda: finished_summary(directory, step=resumed.position.step))
            if before is not None:
                return _nothing_left(before, recipe=recipe, session=session)
        on_rank_0(session.world, lambda: _write_records(recipe, environment, step=resumed.position.step))
        settings = build_settings(recipe, session=session, steps=steps)
        recorder = RunRecorder(
            records, settings, resumed=resumed, loaders=[parts.loader, parts.held_out],
            world=session.world,
        )  # fmt: skip
        checkpoints = Checkpointing(
            settings.checkpoint,
            comm=session.world,
            records=records,
            say=recorder.say,
            clock=recorder.clock,
            requests=SaveRequests(
                run_directory=directory if session.rank == 0 else None, save_signal=save_signal
            ),
            saved_step=resumed.position.step if resumed.path is not None else None,
            begin=_through(tiers, settings, session=session),
        )
        runner = TaskRunner(
            task, parts.model, device=session.device, dtype=MODEL_DTYPE[recipe.run.precision],
            autocast=parts.autocast,
        )  # fmt: skip
        training = Training(
            runner,
            state=state,
            loader=parts.loader,
            held_out=parts.held_out,
            schedule=build_schedule(recipe, steps=steps, decay=parts.decay),
            settings=settings,
            comm=session.world,
            checkpoints=checkpoints,
            recorder=recorder,
            stop=stop,
            identity=identity,
            resumed=resumed,
        )

        def summary(status: str) -> dict[str, Any]:
            return summarize(
                training.totals(),
                recipe=recipe,
                session=session,
                environment=environment,
                wall_s=time.time() - started,
                status=status,
            )

        try:
            training.run()
        except StoppedEarly:
            summary("stopped")
            raise
        except DivergedError:
            summary("diverged")
            raise
        return summary("finished")
    finally:
        records.close()
        updater.close()
        if tiers is not None:
            tiers.close()


def _check_same_recipe(recipe: Recipe, session: Session) -> None:
    """Raises RecipeError on every rank if the ranks' recipes differ; each rank has read its own file. Collective."""
    for name, values in recipe.model_dump().items():
        check_same(session.world, name=f"section [{name}] of the recipe", value=values, error=RecipeError)


def _through(tiers: Tiers | None, settings: LoopSettings, *, session: Session) -> Begin | None:
    """Returns the function that starts a save through the nodes' own storage; None without such storage."""
    if tiers is None:
        return None
    return saving_through(tiers, comm=session.world, options=settings.checkpoint.options)


def _write_records(recipe: Recipe, environment: dict[str, Any], *, step: int) -> None:
    """Writes the recipe and environment of this start, and appends both to `starts.jsonl`. For rank 0."""
    directory = Path(recipe.run.directory)
    (directory / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    write_json(directory / "environment.json", environment)
    starts = RecordWriter(directory / "starts.jsonl")
    starts.write(
        {"time": time.time(), "step": step, "recipe": recipe.model_dump(), "environment": environment}
    )
    starts.close()


def _nothing_left(before: dict[str, Any], *, recipe: Recipe, session: Session) -> dict[str, Any]:
    """Reports that the run was already finished, and leaves its records unchanged. Returns its summary."""
    if session.rank == 0:
        tell(
            f"{recipe.run.name}: already finished, at step {before['step']}; increase run.steps or run.epochs to "
            "continue, or start from scratch with --resume never"
        )
    return before


def _start_anew(recipe: Recipe, session: Session) -> None:
    directory = Path(recipe.run.directory)
    names = ["checkpoints", "metrics", "starts.jsonl", "recipe.toml", "environment.json", SUMMARY]
    moved = [set_aside(directory, names, comm=session.world)]
    if recipe.checkpoint.directory is not None:
        checkpoints = Path(recipe.checkpoint.directory)
        moved.append(set_aside(checkpoints.parent, [checkpoints.name], comm=session.world))
    for place in moved:
        if place is not None and session.rank == 0:
            tell(f"starting from scratch: files of an earlier run were moved to {place}")


def _describe_backend(session: Session, reduction: Reduction) -> str:
    """Describes the communication backends, with the reason for the choice, for the line printed at the start."""
    world = session.world
    if world.backend == world.reduction_backend:
        why = session.backend_reason
        return f"{world.backend} ({why})" if why else world.backend
    if reduction.by_library:
        return f"{world.reduction_backend} for the reduction and {world.backend} for the rest"
    return f"{world.backend} ({world.reduction_backend} is not started: the reduction is hpctrain's own)"


def _tell_start(recipe: Recipe, session: Session, *, reduction: Reduction, dataset: Dataset) -> None:
    if session.rank == 0:
        tell(
            f"{recipe.run.name}: {session.num_ranks} rank{'s' if session.num_ranks > 1 else ''}, "
            f"{session.topology.describe()}, {_describe_backend(session, reduction)}, "
            f"{reduction.algorithm} reduction, "
            f"{reduction.wire} on the wire, {session.device.type}; {dataset.num_samples:,} samples, "
            f"global batch {recipe.data.global_batch}"
        )
