"""The command `hpctrain launch`, which starts the ranks of a command with mpirun or srun."""

from __future__ import annotations

import os
import signal
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpctrain.errors import LaunchError, UsageError
from hpctrain.launch import (
    ForkServer,
    Launcher,
    plan_launch,
    read_hosts,
    resolve_command,
    run_plan,
    survey_machine,
)

LAUNCH_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class ForwardedSignal(str, Enum):
    """The signals that mpirun passes on to the ranks."""

    SIGUSR1 = "SIGUSR1"
    SIGUSR2 = "SIGUSR2"


def launch_command(
    command: Annotated[
        list[str], typer.Argument(help="What each rank runs, after two dashes.", metavar="-- COMMAND ...")
    ],
    num_ranks: Annotated[
        Optional[int],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option("-n", "--num-ranks", help="Number of ranks. With --elastic: left out."),
    ] = None,
    elastic: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--elastic",
            metavar="MIN:MAX",
            help="Range of the number of ranks, which changes as nodes or slots are lost and come back: the same as "
            "`hpctrain supervise --elastic MIN:MAX`, which has more options.",
        ),
    ] = None,
    ranks_per_node: Annotated[
        Optional[int],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option(
            "--ranks-per-node",
            help="Ranks on each node. On one machine: emulate nodes of this many ranks.",
        ),
    ] = None,
    launcher: Annotated[
        Launcher, typer.Option("--launcher", help="auto: srun inside a Slurm allocation, else mpirun.")
    ] = Launcher.AUTO,
    host: Annotated[
        Optional[str], typer.Option("--host", help="Machines to start ranks on, separated by commas.")  # noqa: UP045
    ] = None,
    hostfile: Annotated[
        Optional[Path], typer.Option("--hostfile", help="File with one machine per line.")  # noqa: UP045
    ] = None,
    stop_signal: Annotated[
        ForwardedSignal,
        typer.Option(
            "--stop-signal", help="Signal that the ranks get when you press Ctrl-C or send SIGTERM."
        ),
    ] = ForwardedSignal.SIGUSR1,
    fork_server: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--fork-server/--no-fork-server",
            help="Fork ranks from one process of each node, which has imported their libraries once. Default: for "
            "Python programs with three or more ranks on a node, where there are no GPUs.",
        ),
    ] = None,
    preload: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--preload",
            metavar="MODULE",
            help="A module that is imported before ranks are forked; may be repeated. Implies --fork-server.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
) -> None:
    """Start the ranks of a command, print the launcher's command line, and forward signals and the exit code.

    \b
    hpctrain launch -n 4 -- hpctrain train recipe.toml
    hpctrain launch -n 4 --ranks-per-node 2 -- python train.py         one machine emulates two nodes
    hpctrain launch -n 8 --ranks-per-node 4 --host a,b -- hpctrain train recipe.toml
    hpctrain launch -n 48 --preload my_package -- python train.py      imports it once per node, not per rank
    hpctrain launch --elastic 2:4 --hostfile slots -- hpctrain train recipe.toml    as many ranks as the file has slots

    Ctrl-C or SIGTERM asks the ranks to save and stop (exit code 75); a second Ctrl-C ends them at once.
    """
    if elastic is not None:
        from hpctrain.cli.supervised import supervise

        others = {
            "--launcher": launcher is not Launcher.AUTO,
            "--host": host is not None,
            "--preload": bool(preload),
            "--dry-run": dry_run,
            "--stop-signal": stop_signal is not ForwardedSignal.SIGUSR1,
        }
        for name, is_given in others.items():
            if is_given:
                raise UsageError(f"{name} cannot be combined with --elastic: leave {name} out")
        code = supervise(
            command,
            num_ranks=num_ranks,
            elastic=elastic,
            ranks_per_node=ranks_per_node,
            hostfile=hostfile,
            fork_server=fork_server,
        )
        raise typer.Exit(code)
    if num_ranks is None:
        raise UsageError("the number of ranks is not known: give -n NUMBER, or --elastic MIN:MAX")
    if host is not None and hostfile is not None:
        raise LaunchError("--host and --hostfile both name the machines: give one of them")
    if preload and fork_server is False:
        raise LaunchError("--preload names what a fork server imports: leave out --no-fork-server")
    plan = plan_launch(
        [resolve_command(command[0]), *command[1:]],
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        environ=os.environ,
        machine=survey_machine(),
        launcher=launcher,
        hosts=_read_hosts(host, hostfile),
        hostfile=str(hostfile) if hostfile is not None else None,
        fork_server=None
        if fork_server is False
        else ForkServer(preload=preload or (), by_default=fork_server is None and not preload),
    )
    if dry_run:
        for note in plan.notes:
            typer.echo(f"hpctrain launch: {note}", err=True)
        typer.echo(plan.shell_line())
        return
    raise typer.Exit(run_plan(plan, environ=os.environ, stop_signal=signal.Signals[stop_signal.value]))


def _read_hosts(host: str | None, hostfile: Path | None) -> list[str]:
    if hostfile is not None:
        try:
            names = read_hosts(hostfile.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"--hostfile {hostfile} cannot be read: {error}") from error
    elif host is not None:
        names = [name.strip() for name in host.split(",") if name.strip()]
    else:
        return []
    if not names:
        raise LaunchError(f"{'--hostfile ' + str(hostfile) if hostfile else '--host'} names no machine")
    return names


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(context_settings=LAUNCH_SETTINGS)(launch_command)
    app()
