"""The root command `hpctrain`, and the only place where an error becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import textwrap
from typing import Annotated

from hpctrain.launch import hand_over, restart_with_sleep
from hpctrain.resilience import hold_signals, let_interrupts_end, let_stop_end

if sys.argv[1:2] == ["train"]:
    # Before the slow imports, torch and MPI. `train_command` releases the signals, and enables the garbage collector
    # again.
    hold_signals()
    gc.disable()
    restart_with_sleep()
    hand_over()
elif sys.argv[1:2] in (["launch"], ["supervise"], ["check"]):
    let_interrupts_end()  # until they handle signals

import typer

from hpctrain.errors import ExitCode, HpctrainError, LaunchError
from hpctrain.launch import STOP_VARIABLE, identify, print_and_exit
from hpctrain.version import __version__

HELP = """Distributed PyTorch training on HPC systems, from mpirun and srun.

\b
  hpctrain doctor                                        what is installed, and what is missing
  hpctrain data pack digits data/digits                  make HDF5 shards
  hpctrain train examples/digits.toml                    train, one rank
  hpctrain launch -n 4 -- hpctrain train examples/digits.toml       four ranks
  hpctrain check examples/digits.toml -n 2               whether ranks, micro-batches and resumed runs give the same
  hpctrain plan recipe.toml --ranks 8 --memory 40GB      which ways to split the model fit, and what they cost
  hpctrain slurm submit recipe.toml                      a batch job that resumes until it is done
  srun --ntasks=8 hpctrain train recipe.toml --set run.epochs=3     inside a Slurm job
  hpctrain supervise -n 4 -- hpctrain train recipe.toml      the same, started again after a lost rank or node
  hpctrain supervise --elastic 2:4 -- hpctrain train recipe.toml       fewer ranks after a loss, more when nodes come
  hpctrain stage-environment environment.tar             packages for the nodes' own disks, against slow starts
  hpctrain checkpoint list runs/digits/checkpoints       the saved checkpoints
  hpctrain bench step examples/digits.toml --ranks 1,2,4       samples/s, efficiency, exposed communication
  hpctrain efficiency runs/digits                        where the ranks' time went, and the POP efficiencies
  hpctrain top runs/digits                               a run that goes on: step, speed, slow ranks, incidents
  hpctrain report runs/digits --html report.html         what runs did, how fast, and why not faster
  hpctrain export mlflow runs/digits                     the run for MLflow
  hpctrain export monitoring monitoring                  dashboards for Grafana, alert rules for Prometheus
  hpctrain trace runs/digits -o trace.json               chosen steps of all ranks, for Perfetto

\b
""" + textwrap.fill(f"Exit codes: {'; '.join(f'{code:d} {code.summary}' for code in ExitCode)}.", width=100)

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hpctrain {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of `hpctrain` itself."""


def main() -> None:
    """Entry point of the `hpctrain` command."""
    if sys.argv[1:2] == ["train"]:
        with contextlib.suppress(LaunchError):  # the command raises it again
            _let_stops_end()
    else:
        restart_with_sleep()  # before torch and MPI are loaded
    from hpctrain.cli.commands import add_commands

    add_commands(app, sys.argv[1] if len(sys.argv) > 1 else None)
    try:
        app()
    except HpctrainError as error:
        print_and_exit(error)


def _let_stops_end() -> None:
    """Lets a stop request end this rank while it starts.

    This is done only if no other rank waits for this one afterwards: without a launcher, or under `hpctrain launch`,
    which ends all ranks when one has left.
    """
    identity = identify(os.environ, socket.gethostname())
    if identity.launcher == "none":
        let_interrupts_end()
    elif STOP_VARIABLE in os.environ:
        let_stop_end(os.environ[STOP_VARIABLE], says=identity.rank == 0)


if __name__ == "__main__":
    main()
