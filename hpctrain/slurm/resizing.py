"""Continues a run on another number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import LaunchError, UsageError
from hpctrain.slurm.controller import Controller
from hpctrain.slurm.jobs import Submission, newest_submission, nodes_path, record_submission
from hpctrain.slurm.queue import Job
from hpctrain.slurm.submission import active_jobs, ask_to_stop, kill_jobs, plan_job, stop_jobs, submit_job


@dataclass(frozen=True, kw_only=True)
class Resized:
    """What `resize` did. replaced: jobs that end, before the submitted one begins; none if the job itself shrinks."""

    submission: Submission
    replaced: Sequence[str]


def resize(
    run_directory: Path, *, nodes: int, controller: Controller, overrides: Sequence[str] = ()
) -> Resized:
    """Has the ranks save and stop at a step that they agree on, and the run continue on `nodes` nodes.

    A running job that is shrinkable keeps fewer nodes. Otherwise the run's job is submitted again, to begin when the
    present one has ended. overrides: further ones, after those that it was submitted with.
    Raises UsageError if there is no job to resize, LaunchError if Slurm refuses; the present job then runs on.
    """
    before = newest_submission(run_directory)
    if before.is_array:
        raise UsageError(
            f"job {before.job_id} is an array: cancel it and submit it again with --set slurm.nodes={nodes}"
        )
    active = active_jobs(run_directory, controller)
    if not active:
        raise UsageError(
            f"no job of {run_directory} waits or runs: `hpctrain slurm submit {before.recipe} --set "
            f"slurm.nodes={nodes}` continues the run"
        )
    kept = [override for override in before.overrides if not override.startswith("slurm.nodes=")]
    planned = plan_job(
        Path(before.recipe), overrides=[*kept, *overrides, f"slurm.nodes={nodes}"], folder=Path(before.folder)
    )
    if planned.run_directory.resolve() != run_directory.resolve():
        raise UsageError(
            f"{before.recipe} now names the run directory {planned.run_directory}, but the job's is {run_directory}"
        )
    if before.is_shrinkable and not overrides and _may_shrink(active, nodes=nodes):
        shrunk = replace(before, by="shrink", nodes=nodes, overrides=planned.overrides)
        _shrink(run_directory, shrunk, controller)
        return Resized(submission=shrunk, replaced=())
    ids = [job.job_id for job in active]
    submission = submit_job(planned, controller, by="resize", dependency=f"afterany:{':'.join(ids)}")
    try:
        stop_jobs(active, controller)
    except LaunchError:
        kill_jobs([submission.job_id], controller)
        raise
    return Resized(submission=submission, replaced=ids)


def _may_shrink(active: Sequence[Job], *, nodes: int) -> bool:
    return len(active) == 1 and active[0].state == "RUNNING" and nodes < active[0].num_nodes


def _shrink(run_directory: Path, shrunk: Submission, controller: Controller) -> None:
    path = nodes_path(run_directory, shrunk.job_id)
    try:
        path.write_text(f"{shrunk.nodes}\n", encoding="utf-8")
        record_submission(run_directory, shrunk)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}") from error
    try:
        ask_to_stop([shrunk.job_id], controller)
    except LaunchError:
        path.unlink(missing_ok=True)
        raise
