"""`hpctrain slurm`: the group of commands for batch jobs."""

from __future__ import annotations

import typer

from hpctrain.cli.slurm.jobs import cancel_command, resize_command, status_command
from hpctrain.cli.slurm.submit import render_command, submit_command

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
