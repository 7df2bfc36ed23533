"""Runs the training that a recipe describes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import CheckpointRequests, CheckpointSave, Tiers, identify_run, saving_through
from hpctrain.comm import Section, check_same, in_section, make_shared_folder, on_rank_0
from hpctrain.errors import DivergedError, LaunchError, RecipeError, StoppedEarly
from hpctrain.launch import identify
from hpctrain.reduce import gradient_bytes
from hpctrain.resilience import CheckpointSignal, StopRequest, WallClock
from hpctrain.run.build import (
    build_efficiency_watch,
    build_energy_meter,
    build_parts,
    build_runner,
    build_schedule,
    build_settings,
    build_step_trace,
    build_stop_plan,
    build_straggler_watch,
    checkpoint_directory,
    limit_settings,
    parallelized,
    reduction_plan,
    schedule_of,
    total_steps,
)
from hpctrain.run.compiling import compile_on_each_node, prepare_to_compile
from hpctrain.run.compute.device import loss_scale_for
from hpctrain.run.compute.postponed_dynamo import set_deterministic
from hpctrain.run.compute.ranks import check_num_ranks
from hpctrain.run.data import open_data
from hpctrain.run.directory import claim_run_directory, prepare_run_directory, set_aside
from hpctrain.run.guards import build_guards, compare_ranks, limit_host_memory
from hpctrain.run.initial_state import open_tiers, resume_run, start_from_weights
from hpctrain.run.metrics_out import (
    TENSORBOARD,
    RunFacts,
    check_sinks,
    open_sinks,
    records_steps,
    what_the_last_start_left,
)
from hpctrain.run.probe import PROBE_FILE, probe_before_training
from hpctrain.run.recipe.load import to_toml
from hpctrain.run.recipe.schema import Recipe
from hpctrain.run.record import (
    NODES,
    SUMMARY,
    environment_record,
    finished_summary,
    print_start,
    reduction_record,
    summarize,
    working_commit,
)
from hpctrain.run.session import Session, init
from hpctrain.storage import LOST_AFTER_S, release_lease
from hpctrain.telemetry import ENERGY, RecordWriter, Sinks, tell, write_json
from hpctrain.train import (
    LIMITS_FILE,
    MICRO_BATCH,
    SLOW_FILE,
    Checkpointing,
    EarlyEnd,
    Ema,
    LoopSettings,
    RunRecorder,
    SectionTimes,
    Task,
    Training,
    data_identity,
    derive_seed,
    import_task,
    read_slowest,
    seed_generators,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """The value of `--resume`: the checkpoint `path` to resume from, or `from_scratch` to restore nothing.

    With neither `path` nor `from_scratch`, the run resumes from its newest checkpoint.
    """

    path: Path | None = None
    from_scratch: bool = False

    @classmethod
    def parse(cls, text: str) -> Resume:
        """Parses `auto`, `never`, or the path of a checkpoint."""
        if text in ("auto", "never"):
            return cls(from_scratch=text == "never")
        return cls(path=Path(text))


def train(
    recipe: Recipe,
    *,
    recipe_path: Path,
    resume: Resume,
    stop: StopRequest,
    save_signal: CheckpointSignal | None = None,
) -> dict[str, Any]:
    """Trains as `recipe` says on the ranks that the launcher started. Returns the summary. Collective.

    Raises StoppedEarly, after the state is saved, if a rank was asked to stop.
    """
    search = [Path.cwd(), recipe_path.absolute().parent]
    # Before anything communicates, since the user's module may start processes; the ranks exchange errors later.
    task: Task | RecipeError
    try:
        task = import_task(recipe.task.target, options=recipe.task.options, search=search)
    except RecipeError as error:
        task = error
    # Also before, since it runs git, and forking is unsafe once MPI has started.
    identity = identify(os.environ, socket.gethostname())
    first = identity.rank == 0
    commit = working_commit() if first else None
    # One rank asks Slurm; it does so while the others start.
    clock = WallClock.start(stop_after_s=recipe.stop.after_s) if first else None

    def checked_task() -> Task:
        check_num_ranks(identity, ranks=recipe.run.ranks)
        if isinstance(task, RecipeError):
            raise task
        return task

    with init(
        backend=recipe.run.backend,
        device=recipe.run.device,
        threads_per_rank=recipe.run.threads_per_rank,
        timeout_s=recipe.run.timeout_s,
        algorithm=recipe.reduction.algorithm,
    ) as session:
        stop.leave = session.world.abort  # a rank that leaves at a second signal ends the others
        return carry_out(
            recipe, session.agreed(checked_task, os_error=LaunchError), session=session, resume=resume, stop=stop,
            commit=commit, save_signal=save_signal, clock=clock,
        )  # fmt: skip


def carry_out(
    recipe: Recipe,
    task: Task,
    *,
    session: Session,
    resume: Resume,
    stop: StopRequest,
    commit: str | None = None,
    save_signal: CheckpointSignal | None = None,
    clock: WallClock | None = None,
) -> dict[str, Any]:
    """Trains `task` as `recipe` says on the ranks of an open session. Returns the summary. Collective.

    Args:
        commit: The commit of the user's working directory, for the record; the commit of rank 0 is written.
        save_signal: The signal that requests a checkpoint, as the file `save-now` in the run directory does.
        clock: The clock of the run's time limit, on rank 0; None on other ranks.
    """
    started = time.time()
    directory = Path(recipe.run.directory)
    _check_same_recipe(recipe, session)
    session.agreed(lambda: check_sinks(recipe), os_error=RecipeError)
    if recipe.run.compile:
        session.agreed(lambda: prepare_to_compile(session), os_error=LaunchError)
    limits = session.world.limits
    limits.configure(limit_settings(recipe))
    limits.base = Section.START
    limit_host_memory(recipe, session=session)
    prepare_run_directory(directory, comm=session.world, checks=session.leads_node)
    usual = limits.settings
    limits.configure(usual.longer_by(LOST_AFTER_S))  # rank 0 may have to wait, and says so
    claim_run_directory(directory, comm=session.world)
    limits.configure(usual)
    session.on_close(lambda: release_lease(directory))
    session.world.publish_in(directory / "watch")
    if resume.from_scratch:
        _start_anew(recipe, session)
    run = identify_run(directory, checkpoints=checkpoint_directory(recipe), comm=session.world)
    probes = recipe.stragglers.probe == "start"
    probe = probe_before_training(session, directory=directory) if probes else None
    data = open_data(recipe.data, session=session)
    if recipe.run.deterministic:
        set_deterministic()
    parts = session.agreed(
        lambda: build_parts(recipe, task, session=session, data=data),
        os_error=RecipeError,
    )
    parts = parallelized(parts, recipe, task=task, session=session)
    reduction, schedule = None, schedule_of(recipe)
    if recipe.parallel.shard != "parameters" and recipe.parallel.tensor == recipe.parallel.pipeline == 1:
        # With a schedule, the reduction of its averages.
        reduction = session.reductions.make(
            reduction_plan(recipe), gradient_bytes=gradient_bytes(parts.model), shard=recipe.parallel.shard
        )
    environment = {**environment_record(session, commit=commit), **reduction_record(recipe, reduction)}
    if recipe.reduction.sync_batch_norm:
        # The optimizer already refers to the parameters, which the conversion keeps.
        parts = replace(parts, model=session.sync_batch_norm(parts.model))
    print_start(recipe, session, reduction=reduction, dataset=data.dataset)
    updater = session.distributed_optimizer(
        parts.model,
        parts.optimizer,
        algorithm=recipe.reduction.algorithm,
        wire=recipe.reduction.wire,
        reduction=reduction,
        loss_scale=loss_scale_for(
            recipe.run.precision,
            wire=environment["wire"] if schedule is None else recipe.reduction.wire,
            max_skipped_in_row=recipe.optimizer.max_skipped_in_row,
        ),
        clip_norm=recipe.optimizer.clip_norm,
        compare_ranks=compare_ranks(recipe),
        fused=recipe.optimizer.fused,
        schedule=schedule,
    )
    seed_generators(derive_seed(recipe.run.seed, "rank", session.axes.drawing.index))
    state = session.trainings.state(updater, seed=recipe.run.seed)
    if recipe.optimizer.ema is not None:
        state = replace(state, ema=Ema(parts.model, decay=recipe.optimizer.ema))
    identity = data_identity(parts.loader, fingerprint=data.dataset.manifest.fingerprint)
    make_shared_folder(directory / "metrics", comm=session.world)
    sinks = Sinks()
    records = session.agreed(
        lambda: RecordWriter(
            directory / "metrics" / f"rank-{session.rank:05}.jsonl",
            every_s=recipe.telemetry.write_every_s,
            kinds=None if records_steps(recipe.telemetry.ranks, session=session) else ["damage", ENERGY],
            sinks=sinks,
        ),
        os_error=LaunchError,
    )
    tiers: Tiers | None = None
    try:
        tiers = open_tiers(recipe, session=session, run=run)
        with in_section(session.world, Section.LOAD):
            resumed = resume_run(
                recipe, state, path=resume.path, from_scratch=resume.from_scratch, session=session, identity=identity,
                tiers=tiers,
            )  # fmt: skip
        # The reduction of the checkpoint may have replaced the one that was measured.
        environment |= reduction_record(recipe, reduction)
        if resumed.path is None:
            start_from_weights(recipe, parts.model, session=session)
        steps = total_steps(recipe, parts.loader, position=resumed.position)
        if resumed.path is not None and resumed.position.step >= steps:
            before = on_rank_0(session.world, lambda: finished_summary(directory, step=resumed.position.step))
            if before is not None:
                return _nothing_left(before, recipe=recipe, session=session)
        slowest_s = on_rank_0(
            session.world,
            lambda: _write_records(
                recipe,
                environment,
                step=resumed.position.step,
                total_steps=steps,
                repeats=resume.path is None,
            ),
        )
        limits.count_earlier(slowest_s)
        facts = RunFacts(started=started, environment=environment, reduction=reduction, clock=clock)
        open_sinks(sinks, recipe, session=session, facts=facts)
        settings = build_settings(recipe, session=session, steps=steps)
        recorder = RunRecorder(
            records, settings, resumed=resumed, loaders=[parts.loader, parts.held_out],
            world=session.world, meter=build_energy_meter(recipe, session=session),
            counts_samples=session.axes.counts_samples,
        )  # fmt: skip
        checkpoints = Checkpointing(
            settings.checkpoint,
            comm=session.world,
            records=records,
            say=recorder.say,
            clock=recorder.clock,
            requests=CheckpointRequests(
                run_directory=directory if session.rank == 0 else None, save_signal=save_signal
            ),
            saved_step=resumed.position.step if resumed.path is not None else None,
            begin=_through(tiers, settings, session=session),
        )
        stopping = EarlyEnd(
            stop,
            comm=session.world,
            plan=build_stop_plan(recipe, model=parts.model, saves=checkpoints.times),
            clock=clock,
            say=recorder.say,
        )
        stragglers = build_straggler_watch(recipe, session=session, recorder=recorder, probe=probe)
        runner = build_runner(
            recipe, task, parts, session=session, updater=updater, loss_unit=resumed.loss_unit
        )
        if recipe.run.compile:
            compile_on_each_node(
                recipe, parts.model, session=session, runner=runner, loader=parts.loader,
                epoch=resumed.position.epoch,
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
            stopping=stopping,
            guards=build_guards(
                recipe,
                state,
                resumed=resumed,
                session=session,
                identity=identity,
                tiers=tiers,
                communicates=runner.communicates,
                say=recorder.say,
                records=records,
            ),
            stragglers=stragglers,
            efficiency=build_efficiency_watch(session=session, recorder=recorder),
            trace=build_step_trace(recipe, session=session, updater=updater, recorder=recorder),
            times=SectionTimes(limits, comm=session.world, directory=directory),
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

        limits.base = None
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
        release_lease(directory)
        release_lease(checkpoint_directory(recipe), in_parent=True)
        if clock is not None:
            clock.close()
        sinks.close()
        records.close()
        updater.close()
        if tiers is not None:
            tiers.close()


def _check_same_recipe(recipe: Recipe, session: Session) -> None:
    """Raises RecipeError on every rank if the recipes that the ranks have read differ. Collective."""
    for name, values in recipe.model_dump(exclude={"slurm"}).items():
        check_same(session.world, name=f"section [{name}] of the recipe", value=values, error=RecipeError)


def _through(
    tiers: Tiers | None, settings: LoopSettings, *, session: Session
) -> Callable[..., CheckpointSave] | None:
    """Returns a function that starts a save through the nodes' own storage; None without such storage."""
    if tiers is None:
        return None
    return saving_through(tiers, comm=session.world, options=settings.checkpoint.options)


def _write_records(
    recipe: Recipe, environment: dict[str, Any], *, step: int, total_steps: int, repeats: bool
) -> dict[str, float]:
    """Writes the recipe and environment of this start, and appends both to `starts.jsonl`. For rank 0.

    Returns the slowest time of each section of the run that earlier starts have recorded. repeats: whether this start
    repeats the steps of the previous start after `step`; False if the user chose the checkpoint.
    """
    directory = Path(recipe.run.directory)
    (directory / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    write_json(directory / "environment.json", environment)
    starts = RecordWriter(directory / "starts.jsonl")
    starts.write(
        {
            "time": time.time(), "step": step, "total_steps": total_steps,
            "before": what_the_last_start_left(directory / "metrics" / "rank-00000.jsonl", step=step)
            if repeats
            else None,
            "recipe": recipe.model_dump(), "environment": environment,
        }
    )  # fmt: skip
    starts.close()
    return read_slowest(directory)


def _nothing_left(before: dict[str, Any], *, recipe: Recipe, session: Session) -> dict[str, Any]:
    """Reports that the run is already finished, and returns its summary `before`. The records stay unchanged."""
    if session.rank == 0:
        tell(
            f"{recipe.run.name}: already finished, at step {before['step']}; increase run.steps or run.epochs to "
            "continue, or start from scratch with --resume never"
        )
    return before


def _start_anew(recipe: Recipe, session: Session) -> None:
    directory = Path(recipe.run.directory)
    names = ["checkpoints", "metrics", "starts.jsonl", "recipe.toml", "environment.json", SUMMARY, NODES]
    names += [PROBE_FILE, SLOW_FILE, MICRO_BATCH, LIMITS_FILE, TENSORBOARD]
    moved = [set_aside(directory, names, comm=session.world)]
    if recipe.checkpoint.directory is not None:
        checkpoints = Path(recipe.checkpoint.directory)
        moved.append(set_aside(checkpoints.parent, [checkpoints.name], comm=session.world))
    for place in moved:
        if place is not None and session.rank == 0:
            tell(f"starting from scratch: files of an earlier run were moved to {place}")
