"""The command group `hpctrain slurm` and its commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from hpctrain.launch import SlurmController

# Options and the connection to Slurm that the commands of `hpctrain slurm` share.


Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045  (typer evaluates this on Python 3.10)
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe; may be repeated."),
]
Target = Annotated[
    Path, typer.Argument(help="The recipe, or the run directory.", metavar="RECIPE|RUN_DIRECTORY")
]


def controller() -> SlurmController:
    """Returns the connection to Slurm. It prints to stderr when it waits for a busy controller."""
    from hpctrain.launch import SlurmController

    return SlurmController(say=lambda text: typer.echo(f"hpctrain slurm: {text}", err=True))


# `hpctrain slurm status`, `cancel` and `resize`.


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
    often than once per minute.
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
            "--now",
            help="Do not wait for a save: plain scancel, which kills the ranks after Slurm's KillWait, usually 30 s.",
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
    target: Annotated[
        str,
        typer.Argument(
            help="The recipe, the run directory, or the number of the job.",
            metavar="RECIPE|RUN_DIRECTORY|JOB",
        ),
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes to continue with.")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, and print what would be done; change nothing."),
    ] = False,
    reason: Annotated[str, typer.Option(help="Why, for the record of the run's jobs.")] = "",
) -> None:
    """Continue a run on another number of nodes.

    \b
    hpctrain slurm resize recipe.toml --nodes 2
    hpctrain slurm resize 1234 --nodes 4 --dry-run
    hpctrain slurm resize runs/digits --nodes 8 --set slurm.time=12:00:00

    A job that waits keeps its place in the queue, and asks for the other number of nodes. The ranks of a running job
    save and stop, and a new job begins where they stopped; it is submitted first, so that nothing changes if Slurm
    refuses it. A running job with slurm.shrinkable = true gives nodes back instead.
    """
    from hpctrain.slurm import ResizeWay, carry_out_resize, find_run, plan_resize, run_of_job

    slurm = controller()
    if target.isdigit() and not Path(target).exists():
        directory = run_of_job(target, slurm)
    else:
        directory, _ = find_run(Path(target), overrides=overrides or [])
    plan = plan_resize(directory, nodes=nodes, controller=slurm, overrides=overrides or [])
    after = f"{nodes} node{'s' * (nodes > 1)}"
    if dry_run:
        if plan.way is ResizeWay.RESUBMIT:
            from hpctrain.slurm import check_job

            typer.echo(f"would submit a job with {after}: {check_job(plan.planned, slurm)}")
        for line in plan.describe():
            typer.echo(f"would do: {line}")
        return
    job = carry_out_resize(plan, slurm, reason=reason)
    for line in plan.describe() if job.by == plan.way.value else ():
        typer.echo(line)
    if job.by == ResizeWay.RESUBMIT.value:
        typer.echo(f"submitted job {job.job_id} with {after}, to begin after it")


# `hpctrain slurm render` and `submit`.


def render_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file with a section [slurm].")],
    overrides: Overrides = None,
) -> None:
    """Print the batch script of RECIPE. Slurm is not asked.

    \b
    hpctrain slurm render recipe.toml
    hpctrain slurm render recipe.toml --set slurm.nodes=4 > job.sbatch; sbatch job.sbatch

    The script is made from a Jinja2 template. A site can replace it or blocks of it: slurm.template, or the variable
    HPCTRAIN_SLURM_TEMPLATE (see guides/slurm.md).
    """
    from hpctrain.slurm import plan_job

    typer.echo(plan_job(recipe, overrides=overrides or []).text, nl=False)


def submit_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file with a section [slurm].")],
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|never|PATH",
            help="As for `hpctrain train`, for the job's first start. Later starts resume from the newest "
            "checkpoint.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script and the command; submit nothing.")
    ] = False,
    test_only: Annotated[
        bool,
        typer.Option("--test-only", help="Let Slurm check the job and estimate its start; submit nothing."),
    ] = False,
) -> None:
    """Submit the job of RECIPE. Prints its number, its run directory and its script.

    \b
    hpctrain slurm submit recipe.toml
    hpctrain slurm submit recipe.toml --set slurm.nodes=4 --set slurm.time=02:00:00
    hpctrain slurm submit recipe.toml --resume never
    hpctrain slurm submit recipe.toml --test-only

    Script and job number are kept in `slurm` of the run directory, where status, cancel and resize find them. While a
    job of this run waits or runs, no other is submitted.
    """
    from hpctrain.slurm import check_idle, check_job, plan_job, submit_job

    planned = plan_job(recipe, overrides=overrides or [])
    arguments = [] if resume is None else ["--resume", resume]
    if dry_run:
        typer.echo(planned.text, nl=False)
        typer.echo(f"not submitted: sbatch SCRIPT {' '.join(arguments)}".rstrip(), err=True)
        return
    slurm = controller()
    if test_only:
        typer.echo(check_job(planned, slurm))
        return
    check_idle(planned, slurm)
    job = submit_job(planned, slurm, arguments=arguments)
    typer.echo(f"submitted job {job.job_id}: {planned.describe()}, time limit {planned.recipe.slurm.time}")
    typer.echo(f"run directory: {planned.recipe.run.directory}")
    typer.echo(f"script: {job.script}")


# `hpctrain slurm`: the group of commands for batch jobs.


slurm_app = typer.Typer(
    help="""Submit the batch job of a recipe, from its section [slurm]; follow, end and resize it.

\b
  hpctrain slurm render recipe.toml                   the batch script, to read or to submit with sbatch
  hpctrain slurm submit recipe.toml                   submit it
  hpctrain slurm submit recipe.toml --set slurm.nodes=4 --set run.epochs=20
  hpctrain slurm status recipe.toml                   step, speed, time left, newest good checkpoint, why it waits
  hpctrain slurm resize recipe.toml --nodes 2         save, stop, and continue on 2 nodes
  hpctrain slurm cancel recipe.toml                   save and stop

\b
The job saves before its time limit, queues itself again and resumes. Run these commands in the folder that the
recipe's paths are relative to. Exit codes: 0; 2 usage or recipe; 5 Slurm is not there, refuses, or does not answer.
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

slurm_app.command("render")(render_command)
slurm_app.command("submit")(submit_command)
slurm_app.command("status")(status_command)
slurm_app.command("cancel")(cancel_command)
slurm_app.command("resize")(resize_command)
