"""Plans the job of a recipe, submits it, and ends it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from hpctrain.errors import LaunchError, RecipeError, UsageError
from hpctrain.run import Recipe, SlurmSection, load_recipe
from hpctrain.slurm.controller import Controller, SlurmUnavailable
from hpctrain.slurm.jobs import FOLDER, Submission, record_path, record_submission, recorded_ids
from hpctrain.slurm.queue import Job, queued_jobs
from hpctrain.slurm.script import TEMPLATE_VARIABLE, JobScript, render_script, sweep_points


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job to submit. recipe_path: as the script names it. folder: where sbatch is called, for relative paths."""

    recipe: Recipe
    recipe_path: Path
    overrides: tuple[str, ...]
    folder: Path
    text: str

    @property
    def run_directory(self) -> Path:
        return self.folder / self.recipe.run.directory

    @property
    def is_array(self) -> bool:
        return bool(self.recipe.slurm.array or self.recipe.slurm.sweep)

    def describe(self) -> str:
        """For example `4 nodes x 2 ranks`."""
        nodes, ranks = self.recipe.slurm.nodes, self.recipe.slurm.tasks_per_node
        return f"{nodes} node{'s' * (nodes > 1)} x {ranks} rank{'s' * (ranks > 1)}"


def plan_job(
    recipe_path: Path,
    *,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> PlannedJob:
    """Reads a recipe and writes the script of its job. Does not ask Slurm.

    overrides: `section.key=value`; those of [slurm] shape the job, the others are passed to the ranks.
    folder: the working directory, if it is not this process's.
    Raises RecipeError or LaunchError if the recipe and the job do not fit together.
    """
    folder = Path.cwd() if folder is None else folder
    recipe = load_recipe(folder / recipe_path, overrides=overrides)
    _check(recipe, recipe_path)
    slurm = recipe.slurm
    for number, point in enumerate(sweep_points(slurm)):
        try:
            load_recipe(folder / recipe_path, overrides=[*overrides, *point])
        except RecipeError as error:
            raise RecipeError(f"slurm.sweep, combination {number} ({', '.join(point)}): {error}") from error
    if sweep_points(slurm) or slurm.array:
        _check_array(recipe)
    of_ranks = [override for override in overrides if not override.startswith("slurm.")]
    template = slurm.template or environ.get(TEMPLATE_VARIABLE) or None
    job = JobScript(
        name=recipe.run.name,
        about=[
            f"Trains {recipe_path}. Written by `hpctrain slurm`, from the recipe's section [slurm].",
        ],
        settings=slurm,
        recipe=recipe_path,
        run_directory=recipe.run.directory,
        overrides=of_ranks,
        python=_python(slurm, folder=folder),
        record=record_path(Path(recipe.run.directory)),
        stop_signal=_stop_signal(recipe),
    )
    text = render_script(job, template=None if template is None else folder / template)
    return PlannedJob(
        recipe=recipe, recipe_path=recipe_path, overrides=tuple(overrides), folder=folder, text=text
    )


def submit_job(
    planned: PlannedJob,
    controller: Controller,
    *,
    by: str = "submit",
    arguments: Sequence[str] = (),
    dependency: str | None = None,
) -> Submission:
    """Writes the script into the run directory, submits it, and records the job there.

    arguments: options of `hpctrain train` for this job alone, such as `--resume never`. dependency: instead of the
    recipe's own. Raises LaunchError if Slurm does not take the job.
    """
    place = planned.run_directory / FOLDER
    now = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    script = place / f"{now}-{uuid.uuid4().hex[:4]}.sbatch"
    try:
        place.mkdir(parents=True, exist_ok=True)
        script.write_text(planned.text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"the job's script cannot be written to {script}: {error.strerror}") from error
    options = [] if dependency is None else [f"--dependency={dependency}"]
    try:
        answer = controller.ask(
            ["sbatch", "--parsable", *options, str(script), *arguments],
            cwd=planned.folder,
            done_before=lambda: _find_by_script(controller, script),
        )
    except SlurmUnavailable as error:
        raise SlurmUnavailable(
            f"{error}. Look at `squeue --me` first: the job may have been taken"
        ) from error
    except LaunchError:
        script.unlink(missing_ok=True)
        raise
    submission = Submission(
        job_id=answer.strip().splitlines()[-1].partition(";")[0],
        by=by,
        script=str(script),
        recipe=str(planned.recipe_path),
        overrides=planned.overrides,
        folder=str(planned.folder),
        nodes=planned.recipe.slurm.nodes,
        tasks_per_node=planned.recipe.slurm.tasks_per_node,
        is_array=planned.is_array,
        is_shrinkable=planned.recipe.slurm.shrinkable,
    )
    try:
        record_submission(planned.run_directory, submission)
    except OSError as error:
        raise LaunchError(
            f"job {submission.job_id} is submitted, but cannot be recorded in {place}: {error.strerror}"
        ) from error
    return submission


def check_job(planned: PlannedJob, controller: Controller) -> str:
    """Lets Slurm check the job without submitting it. Returns its answer, with the estimated start.

    Raises LaunchError if Slurm refuses the job.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-slurm-") as folder:
        script = Path(folder, "job.sbatch")
        script.write_text(planned.text, encoding="utf-8")
        words = ["sbatch", "--test-only", str(script)]
        return controller.ask(words, cwd=planned.folder, stream="stderr").strip()


def active_jobs(run_directory: Path, controller: Controller) -> list[Job]:
    """Returns the run's jobs that wait or run. Raises LaunchError."""
    return [job for job in queued_jobs(controller, recorded_ids(run_directory)) if not job.ended]


def check_idle(planned: PlannedJob, controller: Controller) -> None:
    """Raises UsageError if a job of this run waits or runs: two at a time would write to one run directory."""
    active = active_jobs(planned.run_directory, controller)
    if active:
        raise UsageError(
            f"job {active[0].job_id} of {planned.recipe.run.directory} is {active[0].state}: wait for it, end it with "
            "`hpctrain slurm cancel`, or give this run a directory of its own (--set run.directory=...)"
        )


def stop_jobs(jobs: Sequence[Job], controller: Controller) -> None:
    """Removes waiting jobs from the queue; asks the ranks of running ones to save and stop, and not to come back."""
    waiting = [job.job_id for job in jobs if job.waits]
    running = [job.job_id for job in jobs if not job.waits]
    if waiting:
        kill_jobs(waiting, controller)
    if running:
        # To the script alone: the job does not come back.
        controller.ask(["scancel", "--batch", "--signal=TERM", *running])
        ask_to_stop(running, controller)


def ask_to_stop(job_ids: Sequence[str], controller: Controller) -> None:
    """Asks the ranks of running jobs to save and stop; what then becomes of a job is its script's to decide."""
    controller.ask(["scancel", "--batch", "--signal=USR1", *job_ids])


def kill_jobs(job_ids: Sequence[str], controller: Controller) -> None:
    """Cancels jobs. Ranks have Slurm's KillWait, usually 30 s, to save."""
    controller.ask(["scancel", *job_ids])


def _find_by_script(controller: Controller, script: Path) -> str | None:
    """Returns the job that runs `script`, whose name is unique; None if there is none."""
    lines = controller.ask(["squeue", "--me", "--noheader", "--states=all", "--format=%F|%o"]).splitlines()
    found = (line.partition("|") for line in lines)
    return next((job_id for job_id, _, command in found if command.startswith(str(script))), None)


def _check(recipe: Recipe, recipe_path: Path) -> None:
    slurm = recipe.slurm
    if "slurm" not in recipe.model_fields_set:
        raise RecipeError(
            f"{recipe_path} has no section [slurm]: add one with nodes, tasks_per_node and time, or set them with "
            "--set slurm.nodes=2"
        )
    if recipe.run.ranks is not None and recipe.run.ranks != slurm.num_ranks:
        raise RecipeError(
            f"run.ranks = {recipe.run.ranks}, but [slurm] starts {slurm.num_ranks} (nodes = {slurm.nodes}, "
            f"tasks_per_node = {slurm.tasks_per_node}): change one of them"
        )
    if recipe.data.global_batch < slurm.num_ranks:
        raise RecipeError(
            f"data.global_batch = {recipe.data.global_batch} cannot be split over the {slurm.num_ranks} ranks of "
            "[slurm]: every rank needs at least one sample"
        )


def _check_array(recipe: Recipe) -> None:
    if recipe.checkpoint.directory is not None:
        raise RecipeError(
            "checkpoint.directory would be the same for all tasks of the array, which would resume from each other's "
            "checkpoints: leave it out; each task's checkpoints are in its own run directory"
        )


def _stop_signal(recipe: Recipe) -> Literal["USR1", "USR2"]:
    """The signal that the script sends to srun or mpirun, which pass on no other that only asks."""
    if "SIGUSR1" in recipe.stop.signals:
        return "USR1"
    if "SIGUSR2" in recipe.stop.signals and recipe.slurm.launcher != "supervise":
        return "USR2"
    raise RecipeError(
        f"stop.signals are {', '.join(recipe.stop.signals)}: the job's script asks the ranks to stop by SIGUSR1 or, "
        "without launcher = 'supervise', SIGUSR2: add one of them"
    )


def _python(slurm: SlurmSection, *, folder: Path) -> Path | None:
    """The Python environment of the ranks; None if they do not use one of this filesystem."""
    if slurm.container is not None or slurm.python_archive is not None:
        return None
    if slurm.python is not None:
        prefix = folder / slurm.python
    else:
        found = Path(sys.executable).parent / "hpctrain"
        if not found.exists():
            found = Path(shutil.which("hpctrain") or found)
        prefix = found.parent.parent
    if not (prefix / "bin" / "hpctrain").exists():
        raise LaunchError(
            f"there is no hpctrain in {prefix / 'bin'}: set slurm.python to the environment where it is installed"
        )
    return prefix
