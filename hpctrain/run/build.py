"""Creates the objects of a run from the sections of its recipe. Only `parallelized` communicates."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint import Best, Retention, SaveMode, SaveOptions, WhenBusy
from hpctrain.comm import LimitSettings, Section
from hpctrain.data import Dataset, Fixed, Loader, Sequential, Shuffled
from hpctrain.distributed import ParallelPlan, TensorPlan, end_process_group, name_blocks, pipeline_of
from hpctrain.errors import HpctrainError, RecipeError, UsageError
from hpctrain.launch import TERMINAL_VARIABLE
from hpctrain.reduce import (
    CALIBRATION_FILE,
    Adasum,
    CalibrationFiles,
    DistributedOptimizer,
    Layout,
    LocalSteps,
    ReductionRequest,
    SplitModelUpdater,
    check_for_layouts,
    gradient_bytes,
    needs_feedback,
)
from hpctrain.resilience import RecentTimes, TimeToStop, give_back_large_pieces, give_back_once
from hpctrain.run.compute.device import MODEL_DTYPE, autocast_for
from hpctrain.run.compute.pipeline import put_in_stages
from hpctrain.run.data import RunDatasets, order_of
from hpctrain.run.probe import Probe
from hpctrain.run.recipe.parallel_schema import ParallelSection
from hpctrain.run.recipe.schema import OptimizerSection, Recipe
from hpctrain.run.recipe.sections import CheckpointSection
from hpctrain.run.session import Session
from hpctrain.scaling import parse_trace_steps
from hpctrain.stragglers import SlowRankLimits
from hpctrain.telemetry import EnergyMeter, open_counters
from hpctrain.topology import Topology
from hpctrain.train import (
    LR_SCALE,
    CheckpointPolicy,
    Decay,
    EfficiencyWatch,
    LoopSettings,
    PipelineRunner,
    Position,
    Runner,
    RunRecorder,
    Schedule,
    SessionUpdater,
    StepTracer,
    StragglerWatch,
    Task,
    TaskRunner,
    TensorParallelTask,
    check_call,
    derive_seed,
    import_named,
    scaled_lr,
    seed_generators,
)

# The recipe's section [optimizer] as an optimizer and a learning rate schedule.


def build_optimizer(model: torch.nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """Returns the optimizer of the model's trainable parameters, with the learning rate `optimizer.lr`.

    The training loop sets the scheduled rate before each step. Raises RecipeError if the optimizer cannot be created.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise RecipeError(
            "the task's model has no parameter that needs a gradient: there is nothing to train"
        )
    if section.target is not None:
        return _from_target(model, parameters, section, section.target)
    common: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    first, second = section.betas
    match section.name:
        case "sgd":
            return torch.optim.SGD(parameters, momentum=section.momentum, **common)
        case "adam":
            return torch.optim.Adam(parameters, betas=(first, second), **common)
        case "adamw":
            return torch.optim.AdamW(parameters, betas=(first, second), **common)
        case "lars":
            return _large_batch("LARS")(parameters, momentum=section.momentum, **common)
        case "lamb":
            # As in the paper: the decay counts in the ratio of norms, and no bias is corrected.
            return _large_batch("Lamb")(
                parameters, betas=(first, second), weight_decouple=False, adam_debias=True, **common
            )


def check_recipe_optimizer(
    optimizer: torch.optim.Optimizer, parallel: ParallelSection, *, model: torch.nn.Module
) -> None:
    """Raises RecipeError if the optimizer cannot step a model that is split as the section [parallel] says."""
    found = list[Layout]()
    if parallel.tensor > 1:
        found.append("tensor")
    if parallel.pipeline > 1:
        found.append("stages")
    if parallel.shard != "none":
        found.append(parallel.shard)
    try:
        check_for_layouts(optimizer, found, model=model)
    except UsageError as error:
        raise RecipeError(f"section [optimizer]: {error}") from error


def build_decay(section: OptimizerSection) -> Decay | Callable[[int, int], float]:
    """Returns the decay of the learning rate after the warm-up.

    Raises RecipeError if `optimizer.schedule_target` is set and is not a function of (step, number of steps).
    """
    if section.schedule_target is None:
        return Decay(section.schedule)
    found = import_named(section.schedule_target, key="optimizer.schedule_target")
    if not callable(found):
        raise RecipeError(
            f"optimizer.schedule_target = {section.schedule_target} is {type(found).__name__}, not a function"
        )
    check_call(found, 0, 1, target=section.schedule_target, options_key="(step, number of steps)", options={})
    return found


def _large_batch(name: str) -> Callable[..., torch.optim.Optimizer]:
    try:
        found: Callable[..., torch.optim.Optimizer] = getattr(import_module("pytorch_optimizer"), name)
    except ImportError as error:
        raise RecipeError(
            f"optimizer.name = {name.lower()} needs the package pytorch-optimizer: {error}. Install it with "
            "`pip install hpctrain[optimizers]`"
        ) from error
    release = version("pytorch_optimizer")
    if [int(part) for part in re.findall(r"\d+", release)[:2]] < [3, 11]:
        # LARS without weight decay in the layer's ratio, LAMB with weight decay in the gradient.
        raise RecipeError(
            f"optimizer.name = {name.lower()} needs pytorch-optimizer 3.11 or newer. {release} is "
            "installed, which calculates other steps. Update it with `pip install hpctrain[optimizers]`"
        )
    return found


def _from_target(
    model: torch.nn.Module,
    parameters: list[torch.nn.Parameter],
    section: OptimizerSection,
    target: str,
) -> torch.optim.Optimizer:
    found = import_named(target, key="optimizer.target")
    if not callable(found):
        raise RecipeError(f"optimizer.target = {target} is {type(found).__name__}, not a class or a function")
    of_class = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    given: Any = parameters if of_class else model
    options = {"lr": section.lr, **section.options}
    check_call(found, given, target=target, options_key="optimizer.lr and optimizer.options", options=options)
    try:
        made = found(given, **options)
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(f"optimizer.target = {target} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise RecipeError(
            f"optimizer.target = {target} returned {type(made).__name__}, not a torch.optim.Optimizer"
        )
    for group in made.param_groups:
        if group["lr"] != section.lr:
            group[LR_SCALE] = float(group["lr"]) / section.lr
    return made


# Makes the objects of a run from the recipe's sections.


# Estimates the duration of the first save: parameters and two moments, written at this low rate.
_ASSUMED_STATES = 3
_ASSUMED_BYTES_PER_S = 100e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The objects of a run that each rank creates without communication, which may therefore fail on one rank only.

    Attributes:
        loader: The loader of the training data.
        held_out: The loader of the evaluation data; None without `data.held_out`.
        decay: The decay of the learning rate after the warm-up.
        autocast: A function that creates the context in which forward runs.
        tensor_plan: The task's plan for splitting layers; empty if the recipe splits no layers.
    """

    loader: Loader
    held_out: Loader | None
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    decay: Decay | Callable[[int, int], float]
    autocast: Callable[[], AbstractContextManager[object]]
    tensor_plan: TensorPlan


def build_parts(recipe: Recipe, task: Task, *, session: Session, data: RunDatasets) -> Parts:
    """Creates this rank's `Parts` of a run.

    Raises RecipeError if settings contradict each other or the user's `build_model` fails.
    """
    tensor_plan = tensor_plan_of(recipe, task)
    session.axes.arrange(
        tensor=recipe.parallel.tensor, pipeline=recipe.parallel.pipeline
    )  # before the loaders
    loader = _training_loader(recipe, data, session)
    if recipe.parallel.shard == "parameters":
        give_back_large_pieces()  # before the model, which is freed again once it is split
    seed_generators(derive_seed(recipe.run.seed, "model"))
    model = build_model(recipe, task, device=session.device)
    optimizer = build_optimizer(model, recipe.optimizer)
    check_recipe_optimizer(optimizer, recipe.parallel, model=model)
    return Parts(
        loader=loader,
        held_out=_held_out_loader(recipe, data.held_out, session) if data.held_out is not None else None,
        model=model,
        optimizer=optimizer,
        decay=build_decay(recipe.optimizer),
        autocast=autocast_for(recipe.run.precision, device=session.device),
        tensor_plan=tensor_plan,
    )


def parallelized(parts: Parts, recipe: Recipe, *, task: Task, session: Session) -> Parts:
    """Returns `parts` with the model split as the section [parallel] says. Collective.

    Raises RecipeError if the model cannot be split as the section says.
    """
    plan = ParallelPlan(**recipe.parallel.model_dump(), tensor_plan=parts.tensor_plan)
    try:
        if plan.pipeline > 1:
            if put_in_stages(
                parts.model, parts.optimizer, plan, task=task, world=session.world, topology=session.topology,
                device=session.device, timeout_s=session.world.limits.settings.timeout_s,
            ):  # fmt: skip
                session.on_close(end_process_group)
            give_back_once()  # what the other stages had
            return parts
        model = session.parallelize(parts.model, plan)
    except UsageError as error:
        raise RecipeError(f"section [parallel]: {error}", agreed=error.agreed) from error
    if plan.shard != "parameters" and plan.tensor == 1:
        return parts
    # The parameters have been replaced.
    return replace(parts, model=model, optimizer=build_optimizer(model, recipe.optimizer))


def build_runner(
    recipe: Recipe, task: Task, parts: Parts, *, session: Session, updater: SessionUpdater, loss_unit: float | None
) -> Runner:  # fmt: skip
    """Returns the runner that computes batches with `parts.model`.

    loss_unit: in a run that resumes, the unit of the loss weights that the checkpoint contains. None for a new run, and
    if the checkpoint contains no such unit.
    """
    dtype = MODEL_DTYPE[recipe.run.precision]
    feeds_back = needs_feedback(recipe.reduction.wire)
    updater.sums_to_one = feeds_back  # by `LossWeights`
    pipeline = pipeline_of(parts.model)
    if pipeline is None:
        return TaskRunner(
            task, parts.model, device=session.device, dtype=dtype, autocast=parts.autocast,
            counts_samples=session.axes.counts_samples, comm=session.world, loss_unit=loss_unit,
            units_every_step=feeds_back,
        )  # fmt: skip
    assert isinstance(updater, SplitModelUpdater)
    return PipelineRunner(
        task, parts.model, pipeline=pipeline, rows=_pipeline_rows(recipe, session=session), scaled=updater.scaled,
        counts_samples=session.axes.counts_samples, device=session.device, dtype=dtype, autocast=parts.autocast,
        comm=session.world, loss_unit=loss_unit, units_every_step=feeds_back,
    )  # fmt: skip


def _pipeline_rows(recipe: Recipe, *, session: Session) -> int:
    """Returns the number of samples per micro-batch in a pipeline.

    Raises RecipeError if the global batch cannot be divided into equal micro-batches.
    """
    replicas, parts = session.axes.data.size, recipe.parallel.micro_batches
    if recipe.data.global_batch % (replicas * parts):
        raise RecipeError(
            f"data.global_batch = {recipe.data.global_batch} cannot be split into parallel.micro_batches = {parts} "
            f"equal parts on each of {replicas} data-parallel ranks: use a multiple of {replicas * parts}"
        )
    return recipe.data.global_batch // (replicas * parts)


def _training_loader(recipe: Recipe, data: RunDatasets, session: Session) -> Loader:
    ranks = session.axes.data.size
    if recipe.parallel.pipeline > 1:
        _pipeline_rows(recipe, session=session)
    elif recipe.data.global_batch < ranks:
        raise RecipeError(
            f"data.global_batch = {recipe.data.global_batch} cannot be split over {ranks} ranks: every "
            f"rank needs at least one sample. Set data.global_batch to {ranks} or more, or use fewer ranks"
        )
    return session.loader(
        data.samples,
        global_batch=recipe.data.global_batch,
        seed=derive_seed(recipe.run.seed, "order"),
        order=order_of(recipe.data, data.dataset),
        last_batch=recipe.data.last_batch,
        on_damage=recipe.data.on_damage,
        transform=recipe.data.transform,
        workers=recipe.data.workers,
        prefetch_bytes=int(recipe.data.prefetch_mb * 1e6),
    )


def _held_out_loader(recipe: Recipe, dataset: Dataset, session: Session) -> Loader:
    # With evaluation_samples, a fixed shuffled order selects the same samples in every run.
    return session.loader(
        dataset,
        global_batch=max(recipe.data.evaluation_batch, session.axes.data.size),
        order=Fixed(of=Shuffled() if recipe.data.evaluation_samples is not None else Sequential()),
        on_damage=recipe.data.on_damage,
        transform=recipe.data.held_out_transform,
        prefetch_bytes=int(recipe.data.prefetch_mb * 1e6),
    )


def build_model(recipe: Recipe, task: Task, *, device: torch.device) -> torch.nn.Module:
    """Returns the task's model on `device`, in the dtype that `run.precision` gives to parameters.

    Raises RecipeError if the task's code fails.
    """
    try:
        model = task.build_model()
    except HpctrainError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(
            f"{recipe.task.target}.build_model raised {type(error).__name__}: {error}"
        ) from error
    _name_blocks(recipe, task, model)
    model = model.to(device=device, dtype=MODEL_DTYPE[recipe.run.precision])
    if recipe.run.channels_last:
        # Only parameters of four dimensions change; torch converts what they are applied to. The stub lacks this.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _name_blocks(recipe: Recipe, task: Task, model: torch.nn.Module) -> None:
    """If the task has a method `parallel_blocks`, makes `repeated_blocks` return the modules that the method names."""
    method = getattr(task, "parallel_blocks", None)
    if method is None:
        return
    asked = f"{recipe.task.target}.parallel_blocks"
    try:
        names = list(method())
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(f"{asked} raised {type(error).__name__}: {error}") from error
    try:
        name_blocks(model, names)
    except UsageError as error:
        raise RecipeError(f"{asked}: {error}") from error


def tensor_plan_of(recipe: Recipe, task: Task) -> TensorPlan:
    """Returns the task's plan for splitting the layers of its model; empty if `parallel.tensor` is 1.

    Raises RecipeError if `parallel.tensor` is larger and the task has no such plan, or its `tensor_plan` fails.
    """
    if recipe.parallel.tensor == 1:
        return {}
    asked = f"parallel.tensor = {recipe.parallel.tensor}: {recipe.task.target}"
    example = "{'blocks.*.up': 'column', 'blocks.*.down': 'row'} (guides/parallelism.md)"
    if not isinstance(task, TensorParallelTask):
        raise RecipeError(
            f"{asked} does not say how its model is split. Give it a method tensor_plan(self) that returns which "
            f"modules are split and how, for example {example}, or leave parallel.tensor out"
        )
    try:
        plan = dict(task.tensor_plan())
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(f"{asked}.tensor_plan raised {type(error).__name__}: {error}") from error
    if not plan:
        raise RecipeError(f"{asked}.tensor_plan names no modules: it should return, for example, {example}")
    return plan


def total_steps(recipe: Recipe, loader: Loader, *, position: Position) -> int:
    """Returns the number of optimizer steps of the whole run, counted from its start.

    If `run.epochs` is set, the steps after `position` are counted with the current global batch. A run that resumes
    with another global batch therefore still ends with the last epoch.
    """
    if recipe.run.steps is not None:
        return recipe.run.steps
    epochs_after_this = (recipe.run.epochs or 0) - position.epoch - 1
    if epochs_after_this < 0:
        return position.step
    in_this = loader.remaining_batches(start=position.start)
    return position.step + in_this + epochs_after_this * loader.batches_per_epoch


def build_schedule(recipe: Recipe, *, steps: int, decay: Decay | Callable[[int, int], float]) -> Schedule:
    section = recipe.optimizer
    lr = scaled_lr(
        section.lr,
        scaling=section.lr_scaling,
        global_batch=recipe.data.global_batch,
        reference_batch=section.reference_batch,
    )
    return Schedule(
        peak_lr=lr,
        total_steps=steps,
        warmup_steps=section.warmup_steps,
        decay=decay,
        final_fraction=section.final_lr_fraction,
        step_every=section.step_every or 1,
        step_factor=section.step_factor,
    )


def checkpoint_directory(recipe: Recipe) -> Path:
    return Path(recipe.checkpoint.directory or Path(recipe.run.directory) / "checkpoints")


def reduction_plan(recipe: Recipe) -> ReductionRequest:
    """Returns the reduction that the section [reduction] asks for.

    With `reduction.schedule`, such as local SGD, this is the reduction that averages parameters.

    If the section fixes only the algorithm, the wire format is chosen by measurement; if it fixes only the wire format,
    the algorithm is chosen by measurement.
    """
    section = recipe.reduction
    schedule = section.schedule.plain() if section.schedule is not None else None
    return ReductionRequest(
        algorithm=section.algorithm,
        wire=schedule.wire if isinstance(schedule, LocalSteps) else section.wire,
        bucket_bytes=max(1, int(section.bucket_mb * 1e6)) if section.bucket_mb is not None else None,
        adasum=schedule if isinstance(schedule, Adasum) else None,
        files=CalibrationFiles(
            run=Path(recipe.run.directory) / CALIBRATION_FILE,
            shared=Path(section.calibration) if section.calibration is not None else None,
        ),
    )


def schedule_of(recipe: Recipe) -> Mapping[str, Any] | None:
    """Returns the table of `reduction.schedule`; None if it is absent."""
    schedule = recipe.reduction.schedule
    return None if schedule is None else schedule.model_dump()


def retention(section: CheckpointSection) -> Retention:
    best = Best.parse(section.keep_best) if section.keep_best is not None else None
    return Retention(last=section.keep, every_steps=section.keep_every, best=best)


def checkpoint_policy(recipe: Recipe, *, topology: Topology) -> CheckpointPolicy:
    section = recipe.checkpoint
    return CheckpointPolicy(
        directory=checkpoint_directory(recipe),
        every_steps=section.every_steps,
        every_minutes=section.every_minutes,
        by_advice=section.every == "auto",
        failures_per_day=section.failures_per_day,
        mode=SaveMode(section.mode),
        when_busy=WhenBusy(section.when_busy),
        options=SaveOptions(
            keep=retention(section),
            # MPI-IO cannot limit the write rate.
            engine="direct" if section.limit_mb_per_s is not None else section.engine,
            files=section.files,
            node_of_rank=topology.node_of_rank,
            limit_mb_per_s=section.limit_mb_per_s,
            page_cache=section.page_cache,
            replica_check=section.replica_check,
            on_replica_mismatch=section.on_replica_mismatch,
        ),
    )


def build_settings(recipe: Recipe, *, session: Session, steps: int) -> LoopSettings:
    return LoopSettings(
        total_steps=steps,
        checkpoint=checkpoint_policy(recipe, topology=session.topology),
        metrics_every_steps=recipe.telemetry.metrics_every_steps,
        sample_sums=recipe.telemetry.sample_sums,
        evaluate_every_steps=recipe.telemetry.evaluate_every_steps,
        evaluation_samples=recipe.data.evaluation_samples,
        progress_every_s=recipe.telemetry.progress_every_s,
        on_terminal=session.world_size == 1 or TERMINAL_VARIABLE in os.environ,
    )


def build_stop_plan(recipe: Recipe, *, model: torch.nn.Module, saves: RecentTimes) -> TimeToStop:
    """Returns the object that estimates how long it takes to stop the run.

    saves: the durations of the run's saves, which are added while the run trains.
    """
    state_bytes = _ASSUMED_STATES * gradient_bytes(model)
    return TimeToStop(
        margin_s=recipe.stop.margin_s, assumed_save_s=state_bytes / _ASSUMED_BYTES_PER_S, saves=saves
    )


def limit_settings(recipe: Recipe) -> LimitSettings:
    """Returns the time limits of collective operations and of the parts of a run (`run.timeout_s` and [limits])."""
    given: dict[Section, float | None] = {
        section: getattr(recipe.limits, f"{section.value}_s") for section in Section
    }
    return LimitSettings(
        timeout_s=recipe.run.timeout_s, derive=recipe.limits.derive, least_s=recipe.limits.least_s,
        configured={section: seconds for section, seconds in given.items() if seconds is not None},
    )  # fmt: skip


def build_straggler_watch(
    recipe: Recipe, *, session: Session, recorder: RunRecorder, probe: Probe | None
) -> StragglerWatch | None:
    """Returns the watch that finds slow ranks; None if `stragglers.find` is false or there is one rank.

    probe: the measurement of the nodes before training; None if nodes were not measured.
    """
    section = recipe.stragglers
    if not section.find or session.world_size == 1:
        return None
    return StragglerWatch(
        session.world,
        session.topology,
        window_s=section.window_s,
        limits=SlowRankLimits(min_excess=section.min_excess, windows=section.windows),
        probes=section.probe != "off",
        directory=Path(recipe.run.directory),
        records=recorder.records,
        say=recorder.say,
        clock=recorder.clock,
        before=probe.links if probe is not None else None,
    )


def build_efficiency_watch(*, session: Session, recorder: RunRecorder) -> EfficiencyWatch:
    return EfficiencyWatch(session.world, records=recorder.records, clock=recorder.clock)


def build_energy_meter(recipe: Recipe, *, session: Session) -> EnergyMeter | None:
    """Returns the energy meter of this host on the host's first rank; None on other ranks.

    Also returns None if `telemetry.energy_every_s` is 0 or the host has no energy counter that can be read.
    """
    every_s = recipe.telemetry.energy_every_s
    # Emulated nodes share a host, whose energy counts once.
    hosts = [cores.host for cores in session.gather_cores()]
    reads = every_s > 0 and hosts.index(hosts[session.rank]) == session.rank
    counters = open_counters() if reads else []
    return EnergyMeter(counters, every_s=every_s) if counters else None


def build_step_trace(
    recipe: Recipe, *, session: Session, updater: DistributedOptimizer, recorder: RunRecorder
) -> StepTracer:
    chosen = recipe.telemetry.trace_steps
    return StepTracer(
        session.world,
        session.topology,
        steps=parse_trace_steps(chosen) if chosen is not None else (),
        directory=Path(recipe.run.directory),
        updater=updater,
        clock=recorder.clock,
        say=recorder.say,
    )
