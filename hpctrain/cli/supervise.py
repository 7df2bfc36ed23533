"""The command `hpctrain supervise`, which keeps a run alive in one allocation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.supervised import DEFAULT_START_WITHIN_S, DEFAULT_WAIT_S, supervise


def supervise_command(
    command: Annotated[
        list[str], typer.Argument(help="What each rank runs, after two dashes.", metavar="-- COMMAND ...")
    ],
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--num-ranks",
            min=1,
            help="Number of ranks; fewer while too few nodes are left. With --elastic: left out.",
        ),
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            "--elastic",
            metavar="MIN:MAX",
            help="Range of the number of ranks: the run shrinks when nodes or slots are lost, and grows when they come "
            "back.",
        ),
    ] = None,
    elastic_wait_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="--elastic: how long to wait for nodes or slots while there are too few for MIN ranks.",
        ),
    ] = DEFAULT_WAIT_S,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            help="--elastic outside of Slurm: file with a line `localhost slots=N`, read again while the run continues."
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ranks-per-node",
            min=1,
            help="Ranks on each node; nodes of the allocation beyond those are spares. Default: SLURM_NTASKS_PER_NODE.",
        ),
    ] = None,
    run_directory: Annotated[
        Path | None,
        typer.Option(
            help="Where the ledger is kept. Default: run.directory of the recipe of `hpctrain train`."
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Number of restarts in one allocation; after these the job is queued again."
        ),
    ] = 10,
    max_without_progress: Annotated[
        int, typer.Option(min=1, help="Give up after this many restarts in a row without a newer checkpoint.")
    ] = 3,
    node_budget: Annotated[
        int, typer.Option(min=1, help="Number of failures after which a node is excluded.")
    ] = 2,
    exclude_hours: Annotated[
        float,
        typer.Option(
            min=0, help="Hours for which such a node stays excluded, from the last of these failures."
        ),
    ] = 24.0,
    min_nodes: Annotated[
        int, typer.Option(min=1, help="With fewer usable nodes than this the job is queued again.")
    ] = 1,
    start_within_s: Annotated[
        float,
        typer.Option(
            min=1,
            help="Only for `hpctrain train`: if training has not begun after this many seconds, it counts as a hang.",
        ),
    ] = DEFAULT_START_WITHIN_S,
    check: Annotated[
        Path | None,
        typer.Option(help="The site's program that checks a node: it is run on each node before each start."),
    ] = None,
    check_path: Annotated[
        list[Path] | None,
        typer.Option(help="A path that each node must see before each start; may be repeated."),
    ] = None,
    check_timeout_s: Annotated[
        float,
        typer.Option(
            min=1, help="A node that has not answered the checks after this many seconds is not used."
        ),
    ] = 30.0,
    fork_server: Annotated[
        bool | None,
        typer.Option(
            "--fork-server/--no-fork-server",
            help="Fork ranks from one process of each node, as `hpctrain launch` does; restarts import nothing again.",
        ),
    ] = None,
) -> None:
    """Start the ranks of a command, watch them, and start them again after a lost rank or node.

    \b
    hpctrain supervise -n 4 -- hpctrain train recipe.toml                      on this machine
    hpctrain supervise -n 12 --ranks-per-node 4 -- hpctrain train recipe.toml     in a job of four nodes: one is a spare
    hpctrain supervise --elastic 4:16 --ranks-per-node 4 -- hpctrain train recipe.toml     on 1 to 4 nodes, as they live
    hpctrain supervise --elastic 2:4 --hostfile slots -- hpctrain train recipe.toml        as many ranks as slots

    In Slurm, call it in the batch script of a job that was submitted with --no-kill.
    Exit codes: 0 done; 75 queue the job again; 76 do not queue it again; 2 usage; 5 the ranks cannot be launched.
    """
    from hpctrain.supervise import RestartLimits

    limits = RestartLimits(
        max_restarts=max_restarts,
        node_budget=node_budget,
        exclude_for_s=exclude_hours * 3600,
        max_without_progress=max_without_progress,
        min_nodes=min_nodes,
    )
    code = supervise(
        command,
        num_ranks=num_ranks,
        elastic=elastic,
        elastic_wait_s=elastic_wait_s,
        hostfile=hostfile,
        ranks_per_node=ranks_per_node,
        run_directory=run_directory,
        limits=limits,
        start_within_s=start_within_s,
        check=check,
        check_paths=check_path or (),
        check_timeout_s=check_timeout_s,
        fork_server=fork_server,
    )
    raise typer.Exit(code)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        supervise_command
    )
    app()
