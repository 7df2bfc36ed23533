"""Jobs as squeue and sacct list them. Parsing is pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.slurm.controller import Controller, SlurmRefused

# The states of a job that will not run again by itself; in every other it waits, runs or ends.
_ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "SPECIAL_EXIT", "TIMEOUT",
})  # fmt: skip
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_SQUEUE_FIELDS = "%i|%T|%r|%M|%l|%L|%D|%S|%N"
_SACCT_FIELDS = "JobID,State,ExitCode,Start,End,Elapsed,NNodes,NodeList"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, or one task of an array, or, of sacct, one attempt of it.

    job_id: `12`, or `12_3` for task 3 of an array. reason: why it waits, Slurm's word for it; empty if it does not.
    start: when it started or is expected to start, as Slurm writes it; None if unknown.
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


def queued_jobs(controller: Controller, job_ids: Sequence[str]) -> list[Job]:
    """Returns the jobs among `job_ids` that Slurm's controller still knows, oldest first; ended ones stay for minutes.

    Raises LaunchError.
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


def past_jobs(controller: Controller, job_ids: Sequence[str]) -> list[Job] | None:
    """Returns the attempts of jobs that the accounting database knows, oldest first; None if there is no database."""
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
    """Parses the output of squeue with the fields of `queued_jobs`."""
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
    """Parses the output of sacct with the fields of `past_jobs`."""
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


def parse_duration(text: str) -> int | None:
    """Returns the seconds of `1-02:03:04`, `02:03:04` or `3:04`; None for UNLIMITED, NOT_SET, INVALID."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return seconds + 60 * (minutes + 60 * (hours + 24 * days))


def _time(text: str) -> str | None:
    return text if re.match(r"\d{4}-", text) else None
