"""A training run, from its recipe to its summary."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm import all_gather_json
from hpctrain.data import ORDER_NAME, Dataset, Loader
from hpctrain.errors import HpctrainError, LaunchError, RecipeError, StoppedEarly
from hpctrain.launch import TERMINAL_VARIABLE
from hpctrain.reduce import WireFormat
from hpctrain.resilience import StopRequest
from hpctrain.run.directory import prepare_run_directory, set_aside
from hpctrain.run.optimizers import build_optimizer
from hpctrain.run.precision import MODEL_DTYPE, autocast_for, loss_scale_for
from hpctrain.run.recipe import Recipe
from hpctrain.run.recipe_file import to_toml
from hpctrain.run.record import environment_record
from hpctrain.run.session import Session, start
from hpctrain.telemetry import RecordWriter, write_json
from hpctrain.train import (
    CheckpointPolicy,
    Decay,
    LoopSettings,
    Schedule,
    Task,
    Training,
    TrainingState,
    derive_seed,
    import_task,
    scaled_lr,
    seed_generators,
    total_steps,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """What `--resume` asks for."""

    path: Path | None = None
    anew: bool = False

    @classmethod
    def parse(cls, text: str) -> Resume:
        """`auto`, `never`, or the path of a checkpoint."""
        if text in ("auto", "never"):
            return cls(anew=text == "never")
        return cls(path=Path(text))


def train(recipe: Recipe, *, recipe_path: Path, resume: Resume) -> dict[str, Any]:
    """Carry out `recipe` with the ranks that the launcher started. Collective. Returns the summary.

    Raises StoppedEarly when a rank was asked to stop: everything is saved then.
    """
    search = [Path.cwd(), recipe_path.absolute().parent]
    # Before anything communicates: what is wrong with the recipe is wrong on every rank.
    task = import_task(recipe.task.target, options=recipe.task.options, search=search)
    stop = StopRequest().install()
    try:
        with start(
            backend=recipe.run.backend,
            device=recipe.run.device,
            ranks=recipe.run.ranks,
            threads_per_rank=recipe.run.threads_per_rank,
            timeout_s=recipe.run.timeout_s,
        ) as session:
            return carry_out(recipe, task, session=session, resume=resume, stop=stop)
    finally:
        stop.restore()


def carry_out(
    recipe: Recipe, task: Task, *, session: Session, resume: Resume, stop: StopRequest
) -> dict[str, Any]:
    """Train `task` as `recipe` says, with the ranks of an open session. Collective. Returns the summary."""
    started = time.time()
    directory = Path(recipe.run.directory)
    prepare_run_directory(directory, comm=session.world)
    session.agreed(lambda: session.world.publish_in(directory / "watch"), os_error=LaunchError)
    if resume.anew:
        _start_anew(recipe, session)
    wire = WireFormat(recipe.reduction.wire)
    algorithm = session.choose_algorithm(recipe.reduction.algorithm)
    environment = environment_record(session, algorithm=algorithm, wire=wire.value)
    dataset = session.open_dataset(recipe.data.train)
    held_out = session.open_dataset(recipe.data.held_out) if recipe.data.held_out else None
    if session.rank == 0:
        (directory / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
        write_json(directory / "environment.json", environment)
        _tell_start(recipe, session, algorithm=algorithm, wire=wire, dataset=dataset)
    records = RecordWriter(directory / "metrics" / f"rank-{session.rank:05}.jsonl")
    training, updater = None, None
    try:
        loader = session.agreed(lambda: _loader(recipe, dataset, session), os_error=RecipeError)
        if recipe.run.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        seed_generators(derive_seed(recipe.run.seed, "model"))
        model = session.agreed(lambda: _model(recipe, task, session), os_error=RecipeError)
        optimizer = build_optimizer(model, recipe.optimizer)
        updater = session.updater(
            model, optimizer, algorithm=algorithm, wire=wire,
            bucket_bytes=max(1, int(recipe.reduction.bucket_mb * 1e6)),
            loss_scale=loss_scale_for(
                recipe.run.precision, wire=wire, max_skipped_in_row=recipe.optimizer.max_skipped_in_row
            ),
            clip_norm=recipe.optimizer.clip_norm,
        )  # fmt: skip
        seed_generators(derive_seed(recipe.run.seed, "rank", session.rank))
        steps = total_steps(
            epochs=recipe.run.epochs, steps=recipe.run.steps, batches_per_epoch=loader.batches_per_epoch
        )
        training = Training(
            task,
            state=TrainingState(model, optimizer, updater, recipe.run.seed),
            loader=loader,
            held_out=_held_out_loader(recipe, held_out, session) if held_out is not None else None,
            schedule=_schedule(recipe, steps),
            settings=_settings(recipe, session, steps),
            comm=session.world,
            device=session.device,
            autocast=autocast_for(recipe.run.precision, device=session.device),
            identity={
                "dataset": dataset.manifest.fingerprint, "order": ORDER_NAME, "shuffle": recipe.data.shuffle,
                "last_batch": recipe.data.last_batch,
            },
            records=records,
            stop=stop,
            on_step=lambda step: setattr(session.world, "step", step),
        )  # fmt: skip
        if not resume.anew and training.resume(resume.path).step >= steps:
            return _nothing_left(recipe, session, training, steps=steps)
        training.run()
        return _finish(recipe, session, training, environment, started=started, status="finished")
    except StoppedEarly:
        if training is not None:
            _finish(recipe, session, training, environment, started=started, status="stopped")
        raise
    finally:
        records.close()
        if updater is not None:
            updater.close()


def _nothing_left(recipe: Recipe, session: Session, training: Training, *, steps: int) -> dict[str, Any]:
    """The run was finished before: its summary stays as it is."""
    step = training.totals().position.step
    if session.rank == 0:
        print(
            f"{recipe.run.name}: finished before, at step {step} of {steps}; raise run.steps or run.epochs to "
            "go on, or start anew with --resume never",
            flush=True,
        )
    return {"name": recipe.run.name, "status": "finished", "step": step, "steps_here": 0}


def _start_anew(recipe: Recipe, session: Session) -> None:
    directory = Path(recipe.run.directory)
    names = ["checkpoints", "metrics", "summary.json"]
    moved = set_aside(directory, names, comm=session.world)
    if recipe.checkpoint.directory is not None:
        checkpoints = Path(recipe.checkpoint.directory)
        set_aside(checkpoints.parent, [checkpoints.name], comm=session.world)
    if moved is not None and session.rank == 0:
        print(f"starting anew: what an earlier run left is in {moved}", flush=True)


def _tell_start(
    recipe: Recipe, session: Session, *, algorithm: str, wire: WireFormat, dataset: Dataset
) -> None:
    print(
        f"{recipe.run.name}: {session.num_ranks} rank{'s' if session.num_ranks > 1 else ''}, "
        f"{session.topology.describe()}, {session.world.backend}, {algorithm} reduction, {wire.value} on the wire, "
        f"{session.device.type}; {dataset.num_samples:,} samples, global batch {recipe.data.global_batch}",
        flush=True,
    )
    for note in session.notes:
        print(f"note: {note}", flush=True)


def _loader(recipe: Recipe, dataset: Dataset, session: Session) -> Loader:
    if recipe.data.global_batch < session.num_ranks:
        raise RecipeError(
            f"data.global_batch = {recipe.data.global_batch} cannot be split over {session.num_ranks} ranks: every "
            f"rank needs at least one sample. Set data.global_batch to {session.num_ranks} or more, or use fewer ranks"
        )
    return session.loader(
        dataset, global_batch=recipe.data.global_batch, seed=derive_seed(recipe.run.seed, "order"),
        shuffle=recipe.data.shuffle, last_batch=recipe.data.last_batch,
        prefetch_bytes=int(recipe.data.prefetch_mb * 1e6),
    )  # fmt: skip


def _held_out_loader(recipe: Recipe, dataset: Dataset, session: Session) -> Loader:
    # A part of the samples is drawn by the shuffled order of a fixed seed: the same part in every run.
    return session.loader(
        dataset, global_batch=max(recipe.data.evaluation_batch, session.num_ranks), seed=0,
        shuffle=recipe.data.evaluation_samples is not None, prefetch_bytes=int(recipe.data.prefetch_mb * 1e6),
    )  # fmt: skip


def _model(recipe: Recipe, task: Task, session: Session) -> torch.nn.Module:
    try:
        model = task.build_model()
    except HpctrainError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(
            f"{recipe.task.target}.build_model raised {type(error).__name__}: {error}"
        ) from error
    return model.to(device=session.device, dtype=MODEL_DTYPE[recipe.run.precision])


def _schedule(recipe: Recipe, steps: int) -> Schedule:
    section = recipe.optimizer
    return Schedule(
        peak_lr=scaled_lr(
            section.lr, scaling=section.lr_scaling, global_batch=recipe.data.global_batch,
            reference_batch=section.reference_batch,
        ),
        total_steps=steps,
        warmup_steps=section.warmup_steps,
        decay=Decay(section.schedule),
        final_fraction=section.final_lr_fraction,
        step_every=section.step_every or 1,
        step_factor=section.step_factor,
    )  # fmt: skip


def _settings(recipe: Recipe, session: Session, steps: int) -> LoopSettings:
    section = recipe.checkpoint
    return LoopSettings(
        total_steps=steps,
        micro_batches=recipe.data.micro_batches,
        checkpoint=CheckpointPolicy(
            directory=Path(section.directory or Path(recipe.run.directory) / "checkpoints"),
            every_steps=section.every_steps,
            every_minutes=section.every_minutes,
            keep=section.keep,
            engine=section.engine,
        ),
        metrics_every_steps=recipe.telemetry.metrics_every_steps,
        evaluate_every_steps=recipe.telemetry.evaluate_every_steps,
        evaluation_samples=recipe.data.evaluation_samples,
        progress_every_s=recipe.telemetry.progress_every_s,
        on_terminal=session.num_ranks == 1 or TERMINAL_VARIABLE in os.environ,
    )


def _finish(
    recipe: Recipe,
    session: Session,
    training: Training,
    environment: dict[str, Any],
    *,
    started: float,
    status: str,
) -> dict[str, Any]:
    """Merge the ranks' totals into the summary; rank 0 writes and tells it. Collective."""
    totals = training.totals()
    by_rank = all_gather_json(session.world, {"seconds": totals.seconds})
    names = sorted({name for entry in by_rank for name in entry["seconds"]})
    seconds = {n: sum(entry["seconds"].get(n, 0.0) for entry in by_rank) / len(by_rank) for n in names}
    step_s = seconds.get("step", 0.0)
    summary = {
        "name": recipe.run.name,
        "status": status,
        "ranks": session.num_ranks,
        "topology": environment["topology"],
        "backend": environment["backend"],
        "algorithm": environment["algorithm"],
        "wire": environment["wire"],
        "step": totals.position.step,
        "samples_seen": totals.position.samples,
        "steps_here": totals.steps,
        "samples_here": totals.samples,
        "samples_per_s": totals.samples / step_s if step_s else 0.0,
        "wall_s": time.time() - started,
        "seconds": seconds,
        "exposed_sync_share": seconds.get("exposed_sync", 0.0) / step_s if step_s else 0.0,
        "loss": totals.last_loss,
        "quality": totals.quality,
        "skipped_steps": totals.skipped_steps,
        "checkpoints_written": totals.checkpoints,
        "resumed_from": totals.resumed_from,
    }
    if session.rank == 0:
        write_json(Path(recipe.run.directory) / "summary.json", summary)
        quality = "".join(f", {name} {value:.4f}" for name, value in totals.quality.items())
        print(
            f"{recipe.run.name}: {status} at step {totals.position.step}, {summary['samples_per_s']:,.0f} samples/s, "
            f"{summary['exposed_sync_share']:.0%} of the step time exposed to communication{quality}; "
            f"records in {recipe.run.directory}",
            flush=True,
        )
    sys.stdout.flush()
    return summary
