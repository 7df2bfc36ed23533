"""`hpctrain slurm status`, `cancel` and `resize`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hpctrain.cli.slurm.options import Overrides, Target, controller


def status_command(
    target: Target,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where a run is: step, speed, time left, newest good checkpoint, attempts, and why its job waits.

    \b
    hpctrain slurm status recipe.toml
    hpctrain slurm status runs/digits --json

    Reads the run directory, and asks squeue and sacct once. Slurm's controller serves all users: do not call this more
    often than once a minute.
    """
    from hpctrain.slurm import describe_status, find_run, run_statuses

    directory, recipe = find_run(target, overrides=overrides or [])
    statuses = run_statuses(directory, recipe, controller())
    if as_json:
        typer.echo(json.dumps([status.to_json() for status in statuses], indent=1))
        return
    for status in statuses:
        for line in describe_status(status):
            typer.echo(line)


def cancel_command(
    target: Target,
    overrides: Overrides = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Do not wait for a save: plain scancel. Ranks have Slurm's KillWait, usually 30 s."
        ),
    ] = False,
) -> None:
    """End the run's jobs. Running ranks save at a step that all agree on, and the job does not come back.

    \b
    hpctrain slurm cancel recipe.toml
    hpctrain slurm cancel runs/digits --now

    `hpctrain slurm submit` continues the run later.
    """
    from hpctrain.slurm import active_jobs, find_run, kill_jobs, stop_jobs

    directory, _ = find_run(target, overrides=overrides or [])
    slurm = controller()
    jobs = active_jobs(directory, slurm)
    if not jobs:
        typer.echo(f"no job of {directory} waits or runs")
        return
    if now:
        kill_jobs([job.job_id for job in jobs], slurm)
    else:
        stop_jobs(jobs, slurm)
    for job in jobs:
        done = "cancelled" if now or job.waits else "asked to save and stop"
        typer.echo(f"job {job.job_id} ({job.state}): {done}")


def resize_command(
    target: Target,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes to continue with.")],
    overrides: Overrides = None,
) -> None:
    """Continue a run on another number of nodes: its ranks save and stop, and a new job begins where they stopped.

    \b
    hpctrain slurm resize recipe.toml --nodes 2
    hpctrain slurm resize runs/digits --nodes 8 --set slurm.time=12:00:00

    The new job is submitted first, to begin when the present one has ended. If Slurm refuses it, nothing changes. A
    running job with slurm.shrinkable = true gives nodes back instead.
    """
    from hpctrain.slurm import find_run, resize

    directory, _ = find_run(target, overrides=overrides or [])
    done = resize(directory, nodes=nodes, controller=controller(), overrides=overrides or [])
    after = f"{nodes} node{'s' * (nodes > 1)}"
    if not done.replaced:
        typer.echo(f"job {done.submission.job_id}: asked to save, and to continue on {after} of its own")
        return
    typer.echo(f"job {', '.join(done.replaced)}: asked to save and stop")
    typer.echo(f"submitted job {done.submission.job_id} with {after}, to begin after it")
