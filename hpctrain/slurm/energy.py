"""Energy of jobs as Slurm accounts for it. Parsing is pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpctrain.slurm.controller import Controller, SlurmRefused

_FIELDS = "JobIDRaw,ConsumedEnergyRaw"
# Slurm's NO_VAL64 and INFINITE64 are the two largest numbers of 64 bits.
_UNKNOWN = 2**64 - 2


def consumed_energy(controller: Controller, job_ids: Iterable[str]) -> dict[str, float]:
    """Returns the joules of each job of which Slurm knows them: of none where the site's Slurm does not gather energy,
    or has no accounting database. job_ids: as in SLURM_JOB_ID.

    They are those of the job's nodes while it ran, hence of the job only if it had them for itself. Raises LaunchError.
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
    # Of an array sacct lists all tasks.
    return {job: joules for job, joules in found.items() if job in known}


def parse_energy(text: str) -> dict[str, float]:
    """Parses the output of sacct with the fields of `consumed_energy`. Attempts of a requeued job are added up.

    A job's own line counts where it has a number; otherwise the sum of its numbered steps, which srun started. The
    steps `batch` and `extern` measured the same nodes at the same time.
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
