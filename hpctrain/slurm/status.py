"""The status of a run, merged from what Slurm reports and what the run directory contains."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import finished_newest_first, read_structure, step_of
from hpctrain.errors import CheckpointError, LaunchError, UsageError
from hpctrain.launch import SlurmController
from hpctrain.run import Recipe, load_recipe
from hpctrain.slurm.jobs import Job, explain_reason, past_jobs, queued_jobs, record_path, recorded_ids
from hpctrain.supervise import Attempt, effective_time, read_attempts
from hpctrain.telemetry import RunDirectory

# The speed is computed over the steps in this many last bytes of rank 0's records, some 150 steps.
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class CheckpointFound:
    """A checkpoint whose structure and metadata are intact. saved: time of the save, in seconds since 1970."""

    path: str
    step: int
    saved: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run according to its run directory.

    num_starts: number of times that training started or resumed.
    step: newest recorded step, or the step from which training started; None if training never started.
    last_step_at: time of the newest recorded step, in seconds since 1970.
    steps_per_s, samples_per_s: speed over the last steps of the newest start.
    checkpoint: newest intact checkpoint.
    damaged: messages about checkpoints that are newer than `checkpoint` and not intact.
    status: `finished`, `stopped` or `diverged` if the newest start has ended that way; otherwise None.
    job_id: id of the Slurm job of the newest start.
    """

    num_starts: int = 0
    step: int | None = None
    total_steps: int | None = None
    last_step_at: float | None = None
    loss: float | str | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    checkpoint: CheckpointFound | None = None
    damaged: tuple[str, ...] = ()
    status: str | None = None
    job_id: str | None = None

    @property
    def seconds_to_go(self) -> float | None:
        if self.step is None or self.total_steps is None or not self.steps_per_s:
            return None
        return (self.total_steps - self.step) / self.steps_per_s


def read_progress(run_directory: Path, *, checkpoints: Path | None = None) -> Progress:
    """Reads the progress of a run from its files.

    checkpoints: folder of the checkpoints, if it is not in the run directory.

    Raises LaunchError if existing files cannot be read.
    """
    run = RunDirectory(run_directory, error=LaunchError)
    try:
        starts = run.starts()
        began_at = float(starts[-1]["time"]) if starts else 0.0
        steps = [record for record in run.newest_steps(max_bytes=_TAIL_BYTES) if record["time"] >= began_at]
        status = _status(run, began_at=began_at)
        checkpoint, damaged = _newest_good(checkpoints or run_directory / "checkpoints")
    except (OSError, ValueError, KeyError) as error:
        raise LaunchError(f"the run directory {run_directory} cannot be read: {error}") from error
    total = starts[-1].get("total_steps") if starts else None
    found: dict[str, Any] = {}
    if steps:
        first, last = steps[0], steps[-1]
        found = {"step": last["step"], "last_step_at": last["time"], "loss": last["loss"]}
        seconds = last["time"] - first["time"]
        if seconds > 0:
            found["steps_per_s"] = (last["step"] - first["step"]) / seconds
            found["samples_per_s"] = (last["global_samples"] - first["global_samples"]) / seconds
    elif starts:
        found = {"step": starts[-1]["step"]}
    if starts:
        found["job_id"] = starts[-1].get("environment", {}).get("variables", {}).get("SLURM_JOB_ID")
    return Progress(
        num_starts=len(starts),
        total_steps=total,
        checkpoint=checkpoint,
        damaged=damaged,
        status=status,
        **found,
    )


def _status(run: RunDirectory, *, began_at: float) -> str | None:
    summary = run.summary()
    if summary is None or run.summary_path.stat().st_mtime < began_at:
        return None  # there is none, or it is from an earlier start
    return str(summary["status"])


def _newest_good(directory: Path) -> tuple[CheckpointFound | None, tuple[str, ...]]:
    damaged = []
    for path in finished_newest_first(directory):
        try:
            metadata = read_structure(path).metadata
        except CheckpointError as error:
            if path.exists():  # otherwise the run has just deleted it
                damaged.append(str(error))
            continue
        step = step_of(path) or 0
        return CheckpointFound(path=str(path), step=step, saved=metadata.created_unix_s), tuple(damaged)
    return None, tuple(damaged)


_ATTEMPTS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Status of a run, or of one task of an array.

    job: the job of the run to report, see `newest_job`; None if Slurm knows no job of the run.
    attempts: attempts of the run's jobs from Slurm's accounting database; None if there is no database.
    progress: progress according to the run directory.
    ledger: starts of the ranks by `hpctrain supervise`, oldest first; empty if `hpctrain supervise` was not used.
    """

    name: str
    run_directory: str
    job: Job | None
    attempts: Sequence[Job] | None
    progress: Progress
    ledger: Sequence[Attempt] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the whole status as JSON values."""
        spent = effective_time(self.ledger)
        return {
            **asdict(self),
            "seconds_to_go": self.progress.seconds_to_go,
            "ledger": [attempt.to_json() for attempt in self.ledger],
            "effective_time": {**asdict(spent), "share": spent.share} if self.ledger else None,
        }


def newest_job(queued: Sequence[Job], past: Sequence[Job] | None) -> Job | None:
    """Returns the job to report: the oldest job that runs, or else the oldest job that waits.

    Later jobs wait for that job. If all jobs have ended, returns the last job; None if there is no job.
    """
    active = [job for job in queued if not job.ended]
    if active:
        running = [job for job in active if not job.waits]
        return (running or active)[0]
    if queued:
        return queued[-1]
    return past[-1] if past else None


def describe_status(status: RunStatus, *, now: float | None = None) -> list[str]:
    """Returns the status as lines of text for the user. now: current time, in seconds since 1970."""
    now = time.time() if now is None else now
    lines = [f"{status.name}: {_describe_job(status)}"]
    if status.job is not None and status.job.waits and status.job.reason:
        meaning = explain_reason(status.job.reason)
        lines.append(f"  waits: {status.job.reason}" + (f": {meaning}" if meaning else ""))
    lines += [f"  {line}" for line in _describe_progress(status, now=now)]
    lines += [f"  {line}" for line in describe_ledger(status.ledger, now=now)]
    return lines


def _describe_job(status: RunStatus) -> str:
    job, ended = status.job, status.progress.status
    if job is None:
        return f"no job that Slurm still knows; the run is {ended or 'not finished'}"
    words = [f"job {job.job_id} {job.state}"]
    if job.waits:
        words.append(f"{job.num_nodes} node{'s' * (job.num_nodes != 1)} asked for")
        if job.start is not None:
            words.append(f"expected to start at {job.start.replace('T', ' ')}")
    elif not job.ended:
        words.append(f"on {job.node_list or f'{job.num_nodes} nodes'}")
        if job.limit_s is not None and job.left_s is not None:
            words.append(f"{_span(job.left_s)} left of its {_span(job.limit_s)}")
    elif job.exit_code:
        words.append(f"exit code {job.exit_code}")
    if job.ended and ended is not None:
        words.append(f"the run is {ended}")
    return ", ".join(words)


def _describe_progress(status: RunStatus, *, now: float) -> list[str]:
    progress, job = status.progress, status.job
    lines = []
    if progress.step is None:
        lines.append("no step yet")
    else:
        words = [
            f"step {progress.step:,}" + (f" of {progress.total_steps:,}" if progress.total_steps else "")
        ]
        if progress.steps_per_s:
            words.append(f"{progress.steps_per_s:.3g} steps/s, {progress.samples_per_s or 0:,.0f} samples/s")
        if isinstance(progress.loss, float):
            words.append(f"loss {progress.loss:.4f}")
        if progress.last_step_at is not None:
            words.append(f"{_span(now - progress.last_step_at)} ago")
        lines.append(", ".join(words))
    if job is not None and not job.ended and not job.waits:
        lines += _describe_time_to_go(progress, left_s=job.left_s)
    if progress.checkpoint is not None:
        age = _span(now - progress.checkpoint.saved)
        lines.append(
            f"newest good checkpoint: step {progress.checkpoint.step:,}, {age} old, {progress.checkpoint.path}"
        )
    else:
        lines.append("no checkpoint yet")
    lines += [f"NOT GOOD: {text}" for text in progress.damaged]
    lines.append(_describe_attempts(status))
    return lines


def _describe_time_to_go(progress: Progress, *, left_s: int | None) -> list[str]:
    to_go_s = progress.seconds_to_go
    if not to_go_s:
        return []
    text = f"{_span(to_go_s)} to go at this speed"
    if left_s is not None:
        text += (
            ", within the time limit"
            if to_go_s < left_s
            else f", {_span(to_go_s - left_s)} more than the job has left"
        )
    return [text]


def _describe_attempts(status: RunStatus) -> str:
    text = f"training began {status.progress.num_starts} time{'s' * (status.progress.num_starts != 1)}"
    if status.attempts is None:
        return f"{text} (no accounting database: attempts that ended before training began are not known)"
    shown = [
        f"{attempt.state} after {_span(attempt.elapsed_s or 0)}"
        for attempt in status.attempts
        if attempt.state != "PENDING"
    ]
    return f"{text}; attempts: {', '.join(shown) or 'none'}"


def describe_ledger(attempts: Sequence[Attempt], *, now: float) -> list[str]:
    """Returns lines for the user with the effective training time, and the newest attempts with their causes."""
    if not attempts:
        return []
    spent = effective_time(attempts)
    num = f"{len(attempts)} attempt{'s' * (len(attempts) != 1)}"
    share = f", effective training time {spent.share:.0%} of {_span(spent.wall_s)}" if spent.wall_s else ""
    lines = [f"supervisor: {num}{share}"]
    if len(attempts) > _ATTEMPTS_SHOWN:
        lines.append(f"  the last {_ATTEMPTS_SHOWN}:")
    return lines + [f"  {_describe_attempt(attempt, now=now)}" for attempt in attempts[-_ATTEMPTS_SHOWN:]]


def _describe_attempt(attempt: Attempt, *, now: float) -> str:
    if attempt.ended is None:
        words = [f"attempt {attempt.number}: runs for {_span(now - attempt.began)}"]
    else:
        cause = "ended" if attempt.cause is None else attempt.cause.value
        words = [f"attempt {attempt.number}: {cause} after {_span(attempt.ended - attempt.began)}"]
    if attempt.first_step is None:
        words.append("no training")
    elif attempt.last_step is None:
        words.append(f"from step {attempt.first_step:,}")
    else:
        words.append(f"steps {attempt.first_step:,} to {attempt.last_step:,}")
    if attempt.steps_lost:
        words.append(f"{attempt.steps_lost:,} lost")
    if attempt.blamed:
        words.append(f"blamed: {', '.join(attempt.blamed)}")
    return ", ".join(words) + (f": {attempt.reason}" if attempt.reason else "")


def _span(seconds: float) -> str:
    """Returns a duration such as `42 s`, `17 min`, `3 h 05 min`, `2 d 4 h`."""
    seconds = max(0, round(seconds))
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def find_run(target: Path, *, overrides: Sequence[str] = ()) -> tuple[Path, Recipe | None]:
    """Returns the run directory and the recipe of `target`, which is a recipe or a run directory.

    The recipe is None if the run directory contains no recipe.toml. Raises UsageError or RecipeError.
    """
    if not target.is_dir():
        recipe = load_recipe(target, overrides=overrides)
        return Path(recipe.run.directory), recipe
    if not record_path(target).exists() and not (target / "starts.jsonl").exists():
        raise UsageError(f"{target} is not the directory of a run: give a recipe, or its run.directory")
    written = target / "recipe.toml"
    return target, load_recipe(written) if written.exists() else None


def run_statuses(run_directory: Path, recipe: Recipe | None, controller: SlurmController) -> list[RunStatus]:
    """Returns the status of a run, or of each task of its array. Calls squeue and sacct once each.

    Raises LaunchError if Slurm does not answer, or files cannot be read.
    """
    name = run_directory.name if recipe is None else recipe.run.name
    own = None if recipe is None else recipe.checkpoint.directory
    progress = read_progress(run_directory, checkpoints=None if own is None else Path(own))
    ids = recorded_ids(run_directory)
    if not ids and progress.job_id is not None:
        ids = [progress.job_id]  # the script was submitted without `hpctrain slurm`
    queued = queued_jobs(controller, ids)
    past = past_jobs(controller, ids)
    tasks = _tasks(run_directory, [*queued, *(past or [])])
    if not tasks:
        return [_status_of(name, run_directory, progress, queued=queued, past=past)]
    return [
        _status_of(
            f"{name}, task {index}",
            run_directory / f"task-{index}",
            read_progress(run_directory / f"task-{index}"),
            queued=[job for job in queued if _index(job) == index],
            past=None if past is None else [job for job in past if _index(job) == index],
        )
        for index in tasks
    ]


def _status_of(
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
    """Returns the indices of an array's tasks: those that Slurm knows, and those that have a run directory."""
    found = {_index(job) for job in jobs}
    for path in run_directory.glob("task-*"):
        if match := re.fullmatch(r"task-(\d+)", path.name):
            found.add(int(match[1]))
    return sorted(index for index in found if index is not None)


def _index(job: Job) -> int | None:
    match = re.fullmatch(r"\d+_(\d+)", job.job_id)
    return int(match[1]) if match else None
