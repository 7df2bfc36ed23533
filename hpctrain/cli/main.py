"""`hpctrain`: the root command, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import Annotated

import typer

from hpctrain.errors import HpctrainError, LaunchError
from hpctrain.launch import identify, restart_with_sleep
from hpctrain.version import __version__

HELP = """Distributed PyTorch training on HPC systems, from mpirun and srun.

\b
  hpctrain doctor                                        what is installed, and what is missing
  hpctrain data pack digits data/digits                  make HDF5 shards
  hpctrain train examples/digits.toml                    train, one rank
  hpctrain launch -n 4 -- hpctrain train examples/digits.toml       four ranks
  srun --ntasks=8 hpctrain train recipe.toml --set run.epochs=3     inside a Slurm job
  hpctrain checkpoint list runs/digits/checkpoints       the saved checkpoints
  hpctrain bench step examples/digits.toml --ranks 1,2,4       samples/s, efficiency, exposed communication

\b
Exit codes: 0 done; 2 usage or recipe; 3 data; 4 checkpoint; 5 launch or topology; 6 communication;
7 diverged; 75 stopped early with its state saved (run the same command again to resume).
"""

# On a loaded machine the launcher needs up to this long to notice that rank 0 has exited.
OTHERS_SPEAK_AFTER_S = 5.0

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


def _add_commands() -> None:
    from hpctrain.cli.bench.group import bench_app
    from hpctrain.cli.checkpoint.group import checkpoint_app
    from hpctrain.cli.data.group import data_app
    from hpctrain.cli.doctor import doctor_command
    from hpctrain.cli.launch import launch_command
    from hpctrain.cli.train import train_command

    app.command("doctor")(doctor_command)
    app.command("train")(train_command)
    app.command(
        "launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
    )(launch_command)
    app.add_typer(data_app, name="data")
    app.add_typer(checkpoint_app, name="checkpoint")
    app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point of the `hpctrain` command."""
    restart_with_sleep()  # before torch and MPI are loaded
    _add_commands()
    try:
        app()
    except HpctrainError as error:
        tell_and_exit(error)


def tell_and_exit(error: HpctrainError) -> None:
    """Prints `error` once for the whole job, and exits with its code.

    Rank 0 prints at once, and the launcher ends the other ranks when it exits. A rank that still runs after
    OTHERS_SPEAK_AFTER_S prints the error itself, since rank 0 did not have it, unless the error is agreed.
    """
    rank = 0
    with contextlib.suppress(LaunchError):
        rank = identify(os.environ, socket.gethostname()).rank
    prefix = "hpctrain: "
    if rank != 0:
        sys.stdout.flush()
        time.sleep(OTHERS_SPEAK_AFTER_S)
        if error.agreed:
            sys.exit(int(error.exit_code))
        prefix = f"hpctrain: rank {rank} on {socket.gethostname()}: "
    print(f"{prefix}{error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(int(error.exit_code))  # unloading torch takes longer than the other ranks wait


if __name__ == "__main__":
    main()
