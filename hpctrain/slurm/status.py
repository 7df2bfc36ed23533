"""Merges what Slurm and the run directory say of a run. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.slurm.progress import Progress
from hpctrain.slurm.queue import Job
from hpctrain.slurm.waiting import explain_reason
from hpctrain.supervise import Attempt, effective_time

_ATTEMPTS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run, or one task of an array.

    job: its newest job that Slurm knows, or None. attempts: of its jobs, from the accounting database; None without
    one. ledger: starts of the ranks by `hpctrain supervise`, oldest first; empty without it.
    """

    name: str
    run_directory: str
    job: Job | None
    attempts: Sequence[Job] | None
    progress: Progress
    ledger: Sequence[Attempt] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as JSON values."""
        spent = effective_time(self.ledger)
        return {
            **asdict(self),
            "seconds_to_go": self.progress.seconds_to_go,
            "ledger": [attempt.to_json() for attempt in self.ledger],
            "effective_time": {**asdict(spent), "share": spent.share} if self.ledger else None,
        }


def newest_job(queued: Sequence[Job], past: Sequence[Job] | None) -> Job | None:
    """Returns the job to report: the oldest that has not ended (a later one waits for it), or else the last to end."""
    active = [job for job in queued if not job.ended]
    if active:
        running = [job for job in active if not job.waits]
        return (running or active)[0]
    if queued:
        return queued[-1]
    return past[-1] if past else None


def describe_status(status: RunStatus, *, now: float | None = None) -> list[str]:
    """Returns lines for the user. now: seconds since 1970."""
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
        return f"{text} (no accounting database: nothing is known of attempts that did not come to training)"
    shown = [
        f"{attempt.state} after {_span(attempt.elapsed_s or 0)}"
        for attempt in status.attempts
        if attempt.state != "PENDING"
    ]
    return f"{text}; attempts: {', '.join(shown) or 'none'}"


def describe_ledger(attempts: Sequence[Attempt], *, now: float) -> list[str]:
    """Returns lines for the user: the effective training time, and the newest attempts with their causes."""
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
    """For example `42 s`, `17 min`, `3 h 05 min`, `2 d 4 h`."""
    seconds = max(0, round(seconds))
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
