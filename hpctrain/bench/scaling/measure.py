"""Implementation of `hpctrain bench scaling`: makes the runs that are left, and keeps the document up to date."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.bench.scaling.document import (
    ScalingDocument,
    ScalingRun,
    SweepSettings,
    document_start,
    read_scaling_document,
    write_scaling_document,
)
from hpctrain.bench.scaling.jobs import Jobs, check_jobs
from hpctrain.bench.scaling.plan import (
    PlannedRun,
    check_resumable,
    check_settings,
    plan_runs,
    remaining_runs,
)
from hpctrain.bench.scaling.results import fits_of, size_results
from hpctrain.bench.scaling.run import Launches, Starter, run_size
from hpctrain.bench.scaling.samples import check_samples
from hpctrain.bench.step.resources import scratch_folder, shares_cores, threads_of_a_rank
from hpctrain.bench.step.run import HowToRun
from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch import Launcher, Machine, survey_machine
from hpctrain.run import Recipe, working_commit
from hpctrain.slurm import Controller
from hpctrain.telemetry import in_words


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlace:
    """Where a sweep runs. launcher: of ranks started here. scratch: for the runs' files; None: chosen. document: the
    JSON file. recipe_path: as the user named it; its folder is searched for the task. keep: folder in which the run
    directory of the last run of each size is kept, `ranks-N`; None: all are removed."""

    recipe_path: Path
    document: Path
    launcher: Launcher = Launcher.AUTO
    scratch: Path | None = None
    keep: Path | None = None


@dataclass(kw_only=True, slots=True)
class _Sweep:
    """A sweep under way. head: the document's first fields, of when it was begun."""

    recipe: Recipe
    settings: SweepSettings
    place: SweepPlace
    machine: Machine
    head: dict[str, Any]
    runs: list[ScalingRun] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return self.recipe.data.global_batch

    @property
    def remaining(self) -> list[PlannedRun]:
        return remaining_runs(plan_runs(self.settings, batch=self.batch), self.runs)

    def shares_cores(self, num_ranks: int) -> bool:
        per_node = self.settings.ranks_per_node
        return self.settings.start == "launch" and shares_cores(
            num_ranks, machine=self.machine, ranks_per_node=per_node
        )

    def document(self) -> ScalingDocument:
        baseline = min(self.settings.ranks)
        fits = fits_of(self.runs, mode=self.settings.mode)
        sizes = size_results(self.runs, baseline_ranks=baseline, shared=self.shares_cores)
        notes = [
            f"{size.ranks} ranks shared {self.machine.num_cores} cores: their figures do not apply to a machine with a "
            "core for each rank"
            for size in sizes
            if size.shared_cores
        ]
        return ScalingDocument(
            **self.head,
            complete=not self.remaining,
            recipe_path=str(self.place.recipe_path),
            recipe=self.recipe.model_dump(mode="json"),
            settings=self.settings,
            baseline_ranks=baseline,
            samples=check_samples(self.runs, mode=self.settings.mode),
            sizes=sizes,
            fits=None if fits is None else fits.as_json(),
            runs=self.runs,
            notes=notes,
        )


def measure_sweep(
    recipe: Recipe,
    settings: SweepSettings,
    *,
    place: SweepPlace,
    resume: bool = False,
    at_most_rounds: int | None = None,
) -> ScalingDocument:
    """Makes the runs of a sweep, and writes the document after each of them. Returns the document.

    resume: continue what `place.document` holds, if it exists. at_most_rounds: end after so many more rounds.
    While ranks run, signals are handled as `run_launch` does. The document is valid, and can be resumed, whenever this
    is interrupted: by StoppedEarly or KeyboardInterrupt after a signal, or by the error class of a run that failed.
    Raises UsageError before the first run if the sweep cannot be measured or resumed, and DataError if a run saw other
    samples than those before.
    """
    check_settings(settings, batch=recipe.data.global_batch)
    machine = survey_machine()
    threads = settings.threads_per_rank or _threads(recipe, settings, machine=machine)
    settings = settings.model_copy(update={"threads_per_rank": threads})
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"threads_per_rank": threads})})
    sweep = _begin(recipe, settings, place=place, machine=machine, resume=resume)
    left = sweep.remaining
    if at_most_rounds is not None and left:
        left = [run for run in left if run.round < left[0].round + at_most_rounds]
    starter = _starter(sweep, threads=threads)
    shared = settings.start == "jobs" or bool(os.environ.get("SLURM_JOB_ID"))
    if left:
        with _scratch(place.scratch or scratch_folder(recipe, shared=shared)) as folder:
            _measure(sweep, left, starter=starter, threads=threads, folder=Path(folder))
    document = sweep.document()
    write_scaling_document(place.document, document)
    return document


def _threads(recipe: Recipe, settings: SweepSettings, *, machine: Machine) -> int:
    """Returns the default of the number of CPU threads of each rank."""
    if settings.start == "jobs":
        return recipe.slurm.cpus_per_task
    return threads_of_a_rank(max(settings.ranks), machine=machine, ranks_per_node=settings.ranks_per_node)


def _begin(
    recipe: Recipe, settings: SweepSettings, *, place: SweepPlace, machine: Machine, resume: bool
) -> _Sweep:
    if settings.start == "jobs":
        check_jobs(recipe)
    commit = working_commit()
    head = document_start(commit=commit)
    previous = None
    if place.document.exists():
        previous = read_scaling_document(place.document, option="--json")
        if not resume and not previous.complete:
            raise UsageError(
                f"{place.document} holds an unfinished sweep of {len(previous.runs)} runs: continue it with --resume, "
                "or remove it"
            )
    runs: list[ScalingRun] = []
    if resume and previous is not None:
        check_resumable(
            previous, settings=settings, recipe=recipe.model_dump(mode="json"), commit=commit, machine=head["machine"]
        )  # fmt: skip
        head = {name: getattr(previous, name) for name in ("time", "commit", "machine", "versions")}
        runs = list(previous.runs)
    return _Sweep(recipe=recipe, settings=settings, place=place, machine=machine, head=head, runs=runs)


def _starter(sweep: _Sweep, *, threads: int) -> Starter:
    module_folder = sweep.place.recipe_path.absolute().parent
    if sweep.settings.start == "jobs":
        return Jobs(
            controller=Controller(say=_say),
            ranks_per_node=sweep.settings.ranks_per_node or sweep.recipe.slurm.tasks_per_node,
            module_folder=module_folder,
            folder=Path.cwd(),
        )
    return Launches(
        how=HowToRun(
            machine=sweep.machine, launcher=sweep.place.launcher, ranks_per_node=sweep.settings.ranks_per_node,
            threads=threads, module_folder=module_folder, environ=os.environ,
        )
    )  # fmt: skip


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(
            prefix=".hpctrain-scaling-", dir=folder, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise LaunchError(
            f"{folder} cannot be written ({error.strerror}): give --scratch a folder that all nodes share"
        ) from error


def _measure(sweep: _Sweep, left: list[PlannedRun], *, starter: Starter, threads: int, folder: Path) -> None:
    total = len(sweep.runs) + len(left)
    began_s = time.monotonic()
    for number, planned in enumerate(left):
        cell = planned.cell
        run = run_size(
            sweep.recipe, planned, settings=sweep.settings, starter=starter, threads=threads,
            directory=folder / f"run-{planned.round}-{cell.num_ranks}",
            with_environment=all(run.ranks != cell.num_ranks for run in sweep.runs), keep=sweep.place.keep,
        )  # fmt: skip
        check_samples([*sweep.runs, run], mode=sweep.settings.mode)
        sweep.runs.append(run)
        write_scaling_document(sweep.place.document, sweep.document())
        taken_s = time.monotonic() - began_s
        left_s = taken_s / (number + 1) * (len(left) - number - 1)
        _say(
            f"run {len(sweep.runs)}/{total} (round {planned.round + 1}/{sweep.settings.repeats}): {cell.num_ranks} "
            f"rank{'s' * (cell.num_ranks > 1)}, global batch {cell.global_batch}: {run.samples_per_s:,.0f} samples/s; "
            f"about {in_words(left_s)} left"
        )


def _say(text: str) -> None:
    print(f"hpctrain bench scaling: {text}", file=sys.stderr, flush=True)
