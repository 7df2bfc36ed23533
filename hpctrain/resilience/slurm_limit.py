"""The end of a Slurm job, asked of Slurm's controller with squeue."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

# squeue itself waits for a busy controller; `MessageTimeout` is 10 s by default.
SQUEUE_MAY_TAKE_S = 20.0
_ASK_AGAIN_AFTER_S = (60.0, 600.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmAnswer:
    """end_s: when Slurm ends the job, seconds since 1970; None: never, or unknown. problem: why it is unknown."""

    end_s: float | None = None
    problem: str | None = None


def job_to_ask_about(environ: Mapping[str, str]) -> str | None:
    """Returns the job of this process, as squeue and scontrol name it; None outside a Slurm job.

    One task of a job array has the number of the whole array as its SLURM_JOB_ID; for that number squeue lists every
    task. The components of a heterogeneous job end together, and rank 0 is in the first one, whose number stands for
    all of them.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID") or None


def ask_slurm(job: str, *, timeout_s: float = SQUEUE_MAY_TAKE_S) -> SlurmAnswer:
    """Asks Slurm when `job` ends. Not collective; to be called on one rank only, and rarely.

    The child is made by vfork, which is safe with MPI's registered memory. The time is one of the controller's clock.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%l %e"],
            env={**environ, "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return SlurmAnswer(problem=f"squeue did not answer within {timeout_s:.0f} s")
    except OSError as error:
        return SlurmAnswer(problem=f"squeue cannot be run: {error.strerror}")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return SlurmAnswer(problem=f"squeue failed: {lines[-1]}")
    return parse_squeue(done.stdout)


def parse_squeue(text: str) -> SlurmAnswer:
    """Returns the earliest end in squeue's lines `LIMIT END`, one for each component of the job. END: since 1970."""
    ends = []
    for line in text.splitlines():
        words = line.split()
        if len(words) != 2:
            return SlurmAnswer(problem=f"squeue printed {line!r}, and not a time limit and an end")
        limit, end = words
        if limit == "UNLIMITED":
            continue  # Slurm then names an end a year from now
        if not end.isdigit():
            return SlurmAnswer(problem=f"squeue gives {end!r} as the end of the job")
        ends.append(float(end))
    if not text.strip():
        return SlurmAnswer(problem="squeue does not list the job")
    return SlurmAnswer(end_s=min(ends, default=None))


def ask_again_after_s(time_left_s: float | None) -> float:
    """Returns the seconds until Slurm should be asked again, for a limit may be changed: from 1 to 10 minutes."""
    shortest_s, longest_s = _ASK_AGAIN_AFTER_S
    left_s = math.inf if time_left_s is None else time_left_s
    return min(longest_s, max(shortest_s, left_s / 20))
