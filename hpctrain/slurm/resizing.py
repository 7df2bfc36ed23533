"""Changes the number of nodes of a run's job: while it waits in the queue, within a running job, or by another job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch import SlurmController, SlurmRefused, SlurmUnavailable, read_pairs
from hpctrain.slurm.jobs import (
    FOLDER,
    Job,
    Submission,
    newest_submission,
    nodes_path,
    record_submission,
    recorded_ids,
)
from hpctrain.slurm.submission import (
    PlannedJob,
    active_jobs,
    ask_to_stop,
    kill_jobs,
    plan_job,
    stop_jobs,
    submit_job,
)

_NUM_TASKS = "export SLURM_NTASKS=$((SLURM_JOB_NUM_NODES"
_UNLIMITED = ("UNLIMITED", "INFINITE", "")
# States in which a job will not run again by itself, as `scontrol show job` names them.
_OVER = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
})  # fmt: skip


class ResizeWay(Enum):
    """How the number of nodes is changed."""

    QUEUE = "queue"  # the job waits: Slurm changes its request, and it keeps its place in the queue
    SHRINK = "shrink"  # the job runs and is shrinkable: it saves, gives nodes back and continues
    RESUBMIT = (
        "resize"  # the run is submitted again; the new job begins when the present one has saved and ended
    )


@dataclass(frozen=True, kw_only=True)
class ResizePlan:
    """A change that is ready to be carried out.

    before: the newest submission of the run.
    planned: the job with the new number of nodes.
    active: the jobs of the run that wait or run.
    """

    way: ResizeWay
    run_directory: Path
    before: Submission
    planned: PlannedJob
    active: tuple[Job, ...]

    @property
    def nodes(self) -> int:
        return self.planned.recipe.slurm.nodes

    def describe(self) -> list[str]:
        """Returns what carrying out the plan does, as lines of text."""
        ids = ", ".join(job.job_id for job in self.active)
        after = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        if self.way is ResizeWay.QUEUE:
            return [f"job {ids} (PENDING): asks for {after} from now on, and keeps its place in the queue"]
        if self.way is ResizeWay.SHRINK:
            return [f"job {ids}: asked to save, and to continue with {after}"]
        stops = [job.job_id for job in self.active if not job.waits]
        waits = [job.job_id for job in self.active if job.waits]
        lines = [f"job {', '.join(stops)}: asked to save and stop"] * bool(stops)
        return lines + [f"job {', '.join(waits)}: cancelled"] * bool(waits)


def run_of_job(job_id: str, controller: SlurmController) -> Path:
    """Returns the run directory of a job that `hpctrain slurm` has submitted.

    Raises UsageError if Slurm does not know the job, if it has ended or is another user's, or if `hpctrain slurm` has
    not submitted it; LaunchError if Slurm does not answer.
    """
    facts = _job_facts(job_id, controller)
    if facts is None:
        raise UsageError(
            f"Slurm knows no job {job_id}: it ended some minutes ago or more, or there never was one. Give the recipe "
            "or the run directory; `squeue --me` lists the jobs that wait or run"
        )
    _check_owner(job_id, facts)
    script = Path(facts.get("Command", ""))
    directory = script.parent.parent
    if script.parent.name != FOLDER or job_id not in recorded_ids(directory):
        raise UsageError(
            f"job {job_id} was not submitted by `hpctrain slurm submit`, so that its recipe is not known: cancel it, "
            "and submit the recipe with --set slurm.nodes=N"
        )
    if facts.get("JobState") in _OVER:
        raise UsageError(
            f"job {job_id} has ended ({facts['JobState']}): `hpctrain slurm submit` with --set slurm.nodes=N continues "
            "the run"
        )
    return directory


def plan_resize(
    run_directory: Path, *, nodes: int, controller: SlurmController, overrides: Sequence[str] = ()
) -> ResizePlan:
    """Returns how the run's job comes to `nodes` nodes. Changes nothing.

    overrides: `section.key=value` options that are added to those of the present job; with any, the run is submitted
    again.

    Raises UsageError or RecipeError if the job cannot be resized, or not to so many nodes, and LaunchError if Slurm
    does not answer.
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
    facts = _job_facts(active[0].job_id, controller) or {}
    _check_owner(active[0].job_id, facts)
    if nodes == before.nodes and not overrides:
        raise UsageError(
            f"job {active[0].job_id} has {nodes} node{'s' * (nodes > 1)} already: give another number"
        )
    kept = [override for override in before.overrides if not override.startswith("slurm.nodes=")]
    planned = plan_job(
        Path(before.recipe), overrides=[*kept, *overrides, f"slurm.nodes={nodes}"], folder=Path(before.folder)
    )
    if planned.run_directory.resolve() != run_directory.resolve():
        raise UsageError(
            f"{before.recipe} now names the run directory {planned.run_directory}, but the job's is {run_directory}: "
            "set run.directory to that of the job again"
        )
    _check_partition(nodes, facts.get("Partition", ""), controller)
    return ResizePlan(
        way=_way(before, active, planned, nodes=nodes, has_overrides=bool(overrides)), run_directory=run_directory,
        before=before, planned=planned, active=tuple(active),
    )  # fmt: skip


def carry_out_resize(plan: ResizePlan, controller: SlurmController, *, reason: str = "") -> Submission:
    """Carries out a plan, and records it in the run directory. Returns the job that continues the run.

    The ranks of a running job save and stop at a step on which they agree. Where Slurm does not change a waiting job,
    the run is submitted again.

    reason: why the number of nodes is changed, for the record.

    Raises LaunchError if Slurm refuses; the present job then continues.
    """
    changed = replace(
        plan.before, by=plan.way.value, nodes=plan.nodes, overrides=plan.planned.overrides, reason=reason
    )
    if plan.way is ResizeWay.QUEUE:
        try:
            _change_request(plan, controller)
        except SlurmUnavailable:
            raise
        except SlurmRefused:
            # Some sites forbid it; or the job has begun meanwhile, and its ranks are to save before it ends.
            active = tuple(active_jobs(plan.run_directory, controller)) or plan.active
            again = replace(plan, way=ResizeWay.RESUBMIT, active=active)
            return carry_out_resize(again, controller, reason=reason)
        _record(plan, changed)
        return changed
    if plan.way is ResizeWay.SHRINK:
        _shrink(plan, changed, controller)
        return changed
    ids = [job.job_id for job in plan.active]
    submission = submit_job(
        plan.planned, controller, by=plan.way.value, dependency=f"afterany:{':'.join(ids)}", reason=reason
    )
    try:
        stop_jobs(plan.active, controller)
    except LaunchError:
        kill_jobs([submission.job_id], controller)
        raise
    return submission


def _way(
    before: Submission, active: Sequence[Job], planned: PlannedJob, *, nodes: int, has_overrides: bool
) -> ResizeWay:
    if len(active) > 1 or has_overrides:
        return ResizeWay.RESUBMIT
    job = active[0]
    # A successor is submitted with the script of the job before it, which names the number of nodes.
    if (
        job.state == "PENDING"
        and planned.recipe.slurm.on_stop != "successor"
        and _counts_tasks(before.script)
    ):
        return ResizeWay.QUEUE
    if before.is_shrinkable and job.state == "RUNNING" and nodes < job.num_nodes:
        return ResizeWay.SHRINK
    return ResizeWay.RESUBMIT


def _counts_tasks(script: str) -> bool:
    """Returns True if a batch script computes the number of ranks from the nodes that the job gets.

    sbatch has set SLURM_NTASKS for the number of nodes at the submission. A script of an earlier version, or of a site,
    may use that.
    """
    try:
        return _NUM_TASKS in Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _change_request(plan: ResizePlan, controller: SlurmController) -> None:
    slurm = plan.planned.recipe.slurm
    tasks = slurm.nodes * slurm.tasks_per_node
    # Slurm keeps the number of tasks and cores of a request whose number of nodes changes.
    changes = [
        f"NumNodes={slurm.nodes}-{slurm.nodes}", f"NumTasks={tasks}", f"NumCPUs={tasks * slurm.cpus_per_task}"
    ]  # fmt: skip
    controller.ask(["scontrol", "update", f"JobId={plan.active[0].job_id}", *changes])


def _shrink(plan: ResizePlan, shrunk: Submission, controller: SlurmController) -> None:
    path = nodes_path(plan.run_directory, shrunk.job_id)
    try:
        path.write_text(f"{shrunk.nodes}\n", encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}") from error
    _record(plan, shrunk)
    try:
        ask_to_stop([shrunk.job_id], controller)
    except LaunchError:
        path.unlink(missing_ok=True)
        raise


def _record(plan: ResizePlan, submission: Submission) -> None:
    try:
        record_submission(plan.run_directory, submission)
    except OSError as error:
        raise LaunchError(
            f"the change of job {submission.job_id} cannot be recorded in {plan.run_directory}: {error.strerror}"
        ) from error


def _job_facts(job_id: str, controller: SlurmController) -> Mapping[str, str] | None:
    """Returns what `scontrol show job` says of a job; None if Slurm's controller does not know the job."""
    try:
        text = controller.ask(["scontrol", "--oneliner", "show", "job", job_id])
    except SlurmRefused as error:
        if "Invalid job id" in str(error):
            return None
        raise
    found = read_pairs(text)
    if match := re.search(r" Command=(.*?) WorkDir=", text):
        found["Command"] = match[1]
    return found


def _check_owner(job_id: str, facts: Mapping[str, str]) -> None:
    match = re.fullmatch(r"(.*)\((\d+)\)", facts.get("UserId", ""))
    if match is not None and int(match[2]) != os.getuid() and os.getuid() != 0:
        raise UsageError(f"job {job_id} is {match[1]}'s, not yours: ask {match[1]}")


def _check_partition(nodes: int, partition: str, controller: SlurmController) -> None:
    """Raises UsageError if no partition of the job gives so many nodes to a job.

    partition: the job's partition, or several that are separated by commas; "" if unknown.
    """
    limits = []
    for name in filter(None, partition.split(",")):
        facts = read_pairs(controller.ask(["scontrol", "--oneliner", "show", "partition", name]))
        least, most = int(_number(facts.get("MinNodes", "")) or 0), _number(facts.get("MaxNodes", ""))
        total = _number(facts.get("TotalNodes", ""))
        if nodes >= least and all(limit is None or nodes <= limit for limit in (most, total)):
            return
        limits.append(
            f"{name} gives a job {least} to {'any number of' if most is None else most} nodes, and has {total}"
        )
    if limits:
        raise UsageError(f"{nodes} nodes are not possible: partition {'; partition '.join(limits)}")


def _number(text: str) -> int | None:
    return None if text in _UNLIMITED or not text.isdigit() else int(text)
