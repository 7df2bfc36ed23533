"""The jobs of a run: as recorded in its run directory, and as squeue and sacct list them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch import SlurmController, SlurmRefused, parse_duration
from hpctrain.telemetry import RecordWriter, read_records

FOLDER = "slurm"
JOBS = "jobs.jsonl"
NUM_RECENT = 20


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that `hpctrain slurm` has submitted.

    job_id: id of the Slurm job.
    by: `submit`, `resize`, `shrink` (the same job on fewer nodes) or `queue` (the same job, while it waits).
    script: path of the batch script.
    recipe, overrides: the recipe and the `--set` options of the job.
    folder: folder in which sbatch was called, to which the recipe's paths are relative.
    nodes, tasks_per_node: size of the job.
    is_array: True for a job array.
    is_shrinkable: True if the job can continue on fewer nodes.
    reason: why the number of nodes was changed; "" if nobody gave a reason.
    """

    job_id: str
    by: str
    script: str
    recipe: str
    overrides: tuple[str, ...]
    folder: str
    nodes: int
    tasks_per_node: int
    is_array: bool
    is_shrinkable: bool
    reason: str = ""


def record_path(run_directory: Path) -> Path:
    """Returns the path of the file with one line per job of the run.

    If a job is continued by another job, its script adds the line for that job.
    """
    return run_directory / FOLDER / JOBS


def nodes_path(run_directory: Path, job_id: str) -> Path:
    """Returns the path of the file that tells the script of a shrinking job how many nodes to keep."""
    return run_directory / FOLDER / f"nodes-{job_id}"


def record_submission(run_directory: Path, submission: Submission) -> None:
    """Appends the line for a job to the record of the run. Raises OSError."""
    writer = RecordWriter(record_path(run_directory))
    writer.write({"time": time.time(), **asdict(submission)})
    writer.close()
    if writer.error is not None:
        raise writer.error


def recorded_ids(run_directory: Path) -> list[str]:
    """Returns the ids of a run's newest NUM_RECENT jobs, oldest first; [] if no job is recorded. Raises LaunchError."""
    return [str(line["job_id"]) for line in _lines(run_directory) if "job_id" in line][-NUM_RECENT:]


def newest_submission(run_directory: Path) -> Submission:
    """Returns the newest recorded job that was submitted from a recipe.

    Raises UsageError if no such job is recorded, and LaunchError if the record cannot be read.
    """
    names = [name for name in Submission.__dataclass_fields__ if name != "reason"]
    for line in reversed(_lines(run_directory)):
        if set(names) <= line.keys():
            found = {name: line[name] for name in names} | {"overrides": tuple(line["overrides"])}
            return Submission(**found, reason=line.get("reason", ""))
    raise UsageError(
        f"no job of {run_directory} is recorded in {record_path(run_directory)}: submit it with `hpctrain slurm "
        "submit`, or give the recipe or run directory of a run that was submitted"
    )


def _lines(run_directory: Path) -> list[dict[str, Any]]:
    try:
        return [line for line in read_records(record_path(run_directory)) if isinstance(line, dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LaunchError(f"{record_path(run_directory)} cannot be read: {error}") from error


# States of a job that will not run again by itself; in every other state it waits, runs or is ending.
_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "SPECIAL_EXIT", "TIMEOUT",
})  # fmt: skip
_SQUEUE_FIELDS = "%i|%T|%r|%M|%l|%L|%D|%S|%N"
_SACCT_FIELDS = "JobID,State,ExitCode,Start,End,Elapsed,NNodes,NodeList"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, or one task of an array. If sacct listed it, one attempt of this job or task.

    job_id: `12`, or `12_3` for task 3 of an array.
    state: Slurm's state of the job, such as `PENDING`.
    reason: why the job waits, by Slurm's name for the reason; "" if the job does not wait.
    elapsed_s, limit_s, left_s: time used, time limit and time left, in seconds; None if unknown.
    start: when the job started or is expected to start, as Slurm prints it; None if unknown.
    end: when the job ended, as Slurm prints it; None if unknown.
    """

    job_id: str
    state: str
    reason: str = ""
    elapsed_s: int | None = None
    limit_s: int | None = None
    left_s: int | None = None
    num_nodes: int = 0
    node_list: str = ""
    start: str | None = None
    end: str | None = None
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


def queued_jobs(controller: SlurmController, job_ids: Sequence[str]) -> list[Job]:
    """Returns the jobs among `job_ids` that Slurm's controller still knows, oldest first. Raises LaunchError.

    The controller remembers ended jobs for some minutes.
    """
    if not job_ids:
        return []
    words = ["squeue", "--noheader", "--states=all", "--array", f"--jobs={','.join(job_ids)}"]
    try:
        text = controller.ask([*words, f"--format={_SQUEUE_FIELDS}"])
    except SlurmRefused as error:
        if "Invalid job id" in str(error):
            return []
        raise
    return sorted(parse_squeue(text), key=lambda job: [int(part) for part in re.findall(r"\d+", job.job_id)])


def past_jobs(controller: SlurmController, job_ids: Sequence[str]) -> list[Job] | None:
    """Returns the attempts of these jobs in Slurm's accounting database, oldest first.

    A requeued job has several attempts. Returns None if there is no database. Raises LaunchError.
    """
    if not job_ids:
        return []
    words = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--duplicates",
        f"--jobs={','.join(job_ids)}",
    ]
    try:
        return parse_sacct(controller.ask([*words, f"--format={_SACCT_FIELDS}"]))
    except SlurmRefused as error:
        if "disabled" in str(error):
            return None
        raise


def parse_squeue(text: str) -> list[Job]:
    """Parses the output of squeue with the fields that `queued_jobs` requests."""
    found = []
    for line in text.splitlines():
        if line.count("|") != _SQUEUE_FIELDS.count("|"):
            continue
        job_id, state, reason, elapsed, limit, left, nodes, start, node_list = line.split("|")
        found.append(
            Job(
                job_id=job_id,
                state=state,
                reason="" if reason == "None" else reason,
                elapsed_s=parse_duration(elapsed),
                limit_s=parse_duration(limit),
                left_s=parse_duration(left),
                num_nodes=int(nodes) if nodes.isdigit() else 0,
                node_list=node_list,
                start=_time(start),
            )
        )
    return found


def parse_sacct(text: str) -> list[Job]:
    """Parses the output of sacct with the fields that `past_jobs` requests."""
    found = []
    for line in text.splitlines():
        if line.count("|") != _SACCT_FIELDS.count(","):
            continue
        job_id, state, code, start, end, elapsed, nodes, node_list = line.split("|")
        found.append(
            Job(
                job_id=job_id,
                state=state.partition(" ")[0],  # `CANCELLED by 1000`
                exit_code=int(code.partition(":")[0]),
                elapsed_s=parse_duration(elapsed),
                num_nodes=int(nodes) if nodes.isdigit() else 0,
                node_list="" if node_list == "None assigned" else node_list,
                start=_time(start),
                end=_time(end),
            )
        )
    return found


def _time(text: str) -> str | None:
    return text if re.match(r"\d{4}-", text) else None


_REASONS = {
    "Priority": "jobs of higher priority are ahead of it in the queue",
    "Resources": "it is next, and waits until enough nodes are free",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": (
        "the job that it waits for did not end as slurm.dependency requires, so it will "
        "never start: cancel it"
    ),
    "BeginTime": "its earliest start time has not been reached; a job that was queued again waits up to two minutes",
    "JobHeldUser": "it is held: `scontrol release JOB` lets it start",
    "JobHeldAdmin": "an administrator holds it; so does Slurm after a failed start: ask the site's support",
    "JobArrayTaskLimit": "as many tasks of the array run as it allows at a time",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved; if they are reserved for maintenance, "
    "a job with a shorter slurm.time may start before it",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to one job: lower slurm.nodes",
    "PartitionTimeLimit": "it asks for more time than the partition allows: lower slurm.time",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is not active",
    "Reservation": "it waits for its reservation to begin",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has the features, cores or GPUs that it asks for: change slurm.constraint, "
    "cpus_per_task or gpus_per_task",
    "Licenses": "it waits for a licence",
    "Cleaning": "its earlier start is still being cleaned up",
    "launch failed requeued held": "a node could not start it, and it is held: `scontrol release JOB` tries again",
    "RaisedSignal:53(Real-time_signal_19)": "Slurm could not write its output file: is the folder there?",
}


def explain_reason(reason: str) -> str | None:
    """Returns what a waiting job's reason means and what the user can do.

    Returns None if the reason is unknown or needs no explanation.
    """
    # `ReqNodeNotAvail, UnavailableNodes:a,b`
    name = reason.partition(",")[0]
    if name in _REASONS:
        return _REASONS[name]
    if name.startswith(("QOSMax", "AssocMax", "QOSGrp", "AssocGrp", "MaxCpu", "MaxNode")):
        return (
            "a limit of the account or QOS on jobs, nodes or hours is reached: it waits for other jobs to end"
        )
    return None


_FIELDS = "JobIDRaw,ConsumedEnergyRaw"
# Slurm's NO_VAL64 and INFINITE64 are the two largest numbers of 64 bits.
_UNKNOWN = 2**64 - 2


def consumed_energy(controller: SlurmController, job_ids: Iterable[str]) -> dict[str, float]:
    """Returns the energy of each job in joules, by job id. Raises LaunchError.

    The result has no entry for a job whose energy is unknown, because the site's Slurm does not measure energy, or has
    no accounting database. The energy is that of the job's nodes while it ran; if other jobs used these nodes at the
    same time, the result includes the energy of the other jobs.

    job_ids: job ids as in SLURM_JOB_ID.
    """
    known = sorted(set(job_ids))
    if not known:
        return {}
    words = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--jobs={','.join(known)}"]
    try:
        found = parse_energy(controller.ask([*words, f"--format={_FIELDS}"]))
    except SlurmRefused as error:
        if "disabled" in str(error):
            return {}
        raise
    # For one task of an array, sacct lists all tasks.
    return {job: joules for job, joules in found.items() if job in known}


def parse_energy(text: str) -> dict[str, float]:
    """Parses the output of sacct with the fields that `consumed_energy` requests.

    Attempts of a requeued job are added up. If the line of the job itself has a number, that number counts. Otherwise
    the sum over the job's numbered steps, which srun started, counts. The steps `batch` and `extern` are ignored,
    because they measured the same nodes at the same time.
    """
    jobs: dict[str, float] = {}
    steps: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition("|")
        job, _, step = name.partition(".")
        if not value.isdigit() or int(value) >= _UNKNOWN:
            continue
        found = jobs if not step else steps if re.fullmatch(r"\d+", step) else None
        if found is not None:
            found[job] = found.get(job, 0.0) + int(value)
    joules = {job: jobs.get(job, 0.0) or steps.get(job, 0.0) for job in jobs.keys() | steps.keys()}
    return {job: value for job, value in joules.items() if value > 0}
