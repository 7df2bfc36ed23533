"""Asks Slurm and reads the run directory: the status of a run, or of each task of its array."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.run import Recipe, load_recipe
from hpctrain.slurm.controller import Controller
from hpctrain.slurm.jobs import record_path, recorded_ids
from hpctrain.slurm.progress import Progress, read_progress
from hpctrain.slurm.queue import Job, past_jobs, queued_jobs
from hpctrain.slurm.status import RunStatus, newest_job
from hpctrain.supervise import read_attempts


def find_run(target: Path, *, overrides: Sequence[str] = ()) -> tuple[Path, Recipe | None]:
    """Returns the run directory that a recipe names, and the recipe; or `target` itself if it is a run directory.

    Raises UsageError or RecipeError.
    """
    if not target.is_dir():
        recipe = load_recipe(target, overrides=overrides)
        return Path(recipe.run.directory), recipe
    if not record_path(target).exists() and not (target / "starts.jsonl").exists():
        raise UsageError(f"{target} is not the directory of a run: give a recipe, or its run.directory")
    written = target / "recipe.toml"
    return target, load_recipe(written) if written.exists() else None


def run_statuses(run_directory: Path, recipe: Recipe | None, controller: Controller) -> list[RunStatus]:
    """Returns the status of a run; of an array, that of each task. Asks squeue and sacct once each.

    Raises LaunchError if Slurm cannot be asked, or files not be read.
    """
    name = run_directory.name if recipe is None else recipe.run.name
    own = None if recipe is None else recipe.checkpoint.directory
    progress = read_progress(run_directory, checkpoints=None if own is None else Path(own))
    ids = recorded_ids(run_directory)
    if not ids and progress.job_id is not None:
        ids = [progress.job_id]  # of a script that was submitted without `hpctrain slurm`
    queued = queued_jobs(controller, ids)
    past = past_jobs(controller, ids)
    tasks = _tasks(run_directory, [*queued, *(past or [])])
    if not tasks:
        return [_status(name, run_directory, progress, queued=queued, past=past)]
    return [
        _status(
            f"{name}, task {index}",
            run_directory / f"task-{index}",
            read_progress(run_directory / f"task-{index}"),
            queued=[job for job in queued if _index(job) == index],
            past=None if past is None else [job for job in past if _index(job) == index],
        )
        for index in tasks
    ]


def _status(
    name: str, directory: Path, progress: Progress, *, queued: Sequence[Job], past: Sequence[Job] | None
) -> RunStatus:
    return RunStatus(
        name=name,
        run_directory=str(directory),
        job=newest_job(queued, past),
        attempts=past,
        progress=progress,
        ledger=read_attempts(directory),
    )


def _tasks(run_directory: Path, jobs: Sequence[Job]) -> list[int]:
    """Returns the indexes of an array's tasks: those that Slurm knows, and those that have a run directory."""
    found = {_index(job) for job in jobs}
    for path in run_directory.glob("task-*"):
        if match := re.fullmatch(r"task-(\d+)", path.name):
            found.add(int(match[1]))
    return sorted(index for index in found if index is not None)


def _index(job: Job) -> int | None:
    match = re.fullmatch(r"\d+_(\d+)", job.job_id)
    return int(match[1]) if match else None
