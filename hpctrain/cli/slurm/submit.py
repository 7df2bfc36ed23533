"""`hpctrain slurm render` and `submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.slurm.options import Overrides, controller


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
            help="As for `hpctrain train`, for the first start. Later ones resume from the newest checkpoint.",
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
