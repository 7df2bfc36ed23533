"""The jobs of a run, as recorded in `slurm/jobs.jsonl` of its run directory."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import LaunchError, UsageError
from hpctrain.telemetry import RecordWriter, read_records

FOLDER = "slurm"
JOBS = "jobs.jsonl"
NUM_RECENT = 20


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that `hpctrain slurm` has submitted.

    by: `submit`, `resize` or `shrink` (the same job on fewer nodes). script: its batch script. recipe, overrides: what
    it was made from. folder: where sbatch was called, to which the recipe's paths are relative.
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


def record_path(run_directory: Path) -> Path:
    """Returns the file with one line for each job. A job adds a line for its successor."""
    return run_directory / FOLDER / JOBS


def nodes_path(run_directory: Path, job_id: str) -> Path:
    """Returns the file from which a job's script reads how many nodes to keep."""
    return run_directory / FOLDER / f"nodes-{job_id}"


def record_submission(run_directory: Path, submission: Submission) -> None:
    """Appends a line for a job. Raises OSError."""
    writer = RecordWriter(record_path(run_directory))
    writer.write({"time": time.time(), **asdict(submission)})
    writer.close()


def recorded_ids(run_directory: Path) -> list[str]:
    """Returns the newest NUM_RECENT jobs of a run, oldest first; [] if it has none. Raises LaunchError."""
    return [str(line["job_id"]) for line in _lines(run_directory) if "job_id" in line][-NUM_RECENT:]


def newest_submission(run_directory: Path) -> Submission:
    """Returns the newest job that was made from a recipe. Raises UsageError if there is none, or LaunchError."""
    names = Submission.__dataclass_fields__
    for line in reversed(_lines(run_directory)):
        if names.keys() <= line.keys():
            return Submission(
                **{**{name: line[name] for name in names}, "overrides": tuple(line["overrides"])}
            )
    raise UsageError(
        f"no job of {run_directory} is recorded in {record_path(run_directory)}: submit it with `hpctrain slurm "
        "submit`, or name the recipe or run directory of another"
    )


def _lines(run_directory: Path) -> list[dict[str, Any]]:
    try:
        return [line for line in read_records(record_path(run_directory)) if isinstance(line, dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LaunchError(f"{record_path(run_directory)} cannot be read: {error}") from error
