"""Starts each run of a sweep as a Slurm job of its own size, from the recipe's section [slurm]."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.bench.step.plan import StepCell
from hpctrain.errors import LaunchError, StoppedEarly, UsageError
from hpctrain.run import Recipe, to_toml
from hpctrain.slurm import Controller, kill_jobs, plan_job, queued_jobs, submit_job

LAST_LINES = 20
# The controller serves all users: it is asked ever more rarely, until the run has written its summary.
FIRST_PAUSE_S, LONGEST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0, 1.0
# Another node's file may be seen late on a network filesystem.
SEEN_AFTER_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Jobs:
    """Submits one job at a time and waits for its end. ranks_per_node: in all jobs but smaller ones.

    module_folder: searched for the task, in addition to PYTHONPATH. folder: in which sbatch is called.
    """

    controller: Controller
    ranks_per_node: int
    module_folder: Path
    folder: Path

    def start(self, recipe: Recipe, cell: StepCell, *, directory: Path) -> str:
        path = directory / "recipe.toml"
        path.write_text(to_toml(self._with_job(recipe, cell, directory=directory)), encoding="utf-8")
        planned = plan_job(path, folder=self.folder)
        job_id = submit_job(
            planned, self.controller, by="bench scaling", arguments=["--resume", "never"]
        ).job_id
        summary = directory / "run" / "summary.json"
        try:
            state = self._wait(job_id, summary)
        except KeyboardInterrupt:
            kill_jobs([job_id], self.controller)
            raise StoppedEarly(f"stopped during job {job_id}, which was cancelled") from None
        if state not in ("", "COMPLETED") or not _finished(summary):
            raise LaunchError(
                f"job {job_id} on {cell.num_ranks} ranks with a global batch of {cell.global_batch} did not finish. "
                f"Its last lines:\n{_last_lines(directory / 'output.txt')}"
            )
        return job_id

    def _with_job(self, recipe: Recipe, cell: StepCell, *, directory: Path) -> Recipe:
        per_node = min(self.ranks_per_node, cell.num_ranks)
        given = recipe.slurm.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        slurm = recipe.slurm.model_copy(
            update={
                "nodes": cell.num_ranks // per_node,
                "tasks_per_node": per_node,
                "on_stop": "end",
                "shrinkable": False,
                "array": None,
                "sweep": {},
                "spares": 0,
                "launcher": "srun" if recipe.slurm.launcher == "supervise" else recipe.slurm.launcher,
                "output": str(directory / "output.txt"),
                "environment": {
                    **recipe.slurm.environment,
                    "PYTHONPATH": os.pathsep.join(filter(None, [given, str(self.module_folder)])),
                },
            }
        )
        return recipe.model_copy(update={"slurm": slurm})

    def _wait(self, job_id: str, summary: Path) -> str:
        """Waits until the job has ended. Returns its state, "" if Slurm has forgotten it.

        Raises KeyboardInterrupt if a signal handler does.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            time.sleep(pause_s)
            jobs = queued_jobs(self.controller, [job_id])
            if all(job.ended for job in jobs):
                return jobs[-1].state if jobs else ""
            pause_s = LAST_PAUSE_S if summary.exists() else min(1.5 * pause_s, LONGEST_PAUSE_S)


def check_jobs(recipe: Recipe) -> None:
    """Raises UsageError if no jobs can be made of the recipe, or none can be submitted from here."""
    if "slurm" not in recipe.model_fields_set:
        raise UsageError(
            "--jobs: the recipe has no section [slurm], which says how a job is submitted: add one with time and, if "
            "your site wants them, partition and account"
        )
    if os.environ.get("SLURM_JOB_ID"):
        raise UsageError(
            f"--jobs submits jobs, but this shell is already in job {os.environ['SLURM_JOB_ID']}: leave out --jobs to "
            "measure in this allocation, or call it outside"
        )


def _finished(summary: Path) -> bool:
    deadline_s = time.monotonic() + SEEN_AFTER_S
    while not summary.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.5)
    return bool(json.loads(summary.read_text(encoding="utf-8"))["status"] == "finished")


def _last_lines(output: Path) -> str:
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines[-LAST_LINES:]) or "  (it printed nothing)"
