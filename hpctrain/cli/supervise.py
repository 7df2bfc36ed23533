"""The command `hpctrain supervise`, which keeps a run alive in one allocation."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.errors import UsageError

# Longer than the checks of nodes between two attempts take.
_SERVER_LINGERS_S = 120.0


def supervise_command(
    command: Annotated[
        list[str], typer.Argument(help="What each rank runs, after two dashes.", metavar="-- COMMAND ...")
    ],
    num_ranks: Annotated[
        int,
        typer.Option("-n", "--num-ranks", min=1, help="Number of ranks; fewer while too few nodes are left."),
    ],
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
    ] = 300.0,
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

    In Slurm, call it in the batch script of a job that was submitted with --no-kill.
    Exit codes: 0 done; 75 queue the job again; 76 do not queue it again; 2 usage; 5 the ranks cannot be launched.
    """
    from hpctrain.launch import ForkServer, refuse_program_on_stdin, resolve_command, survey_machine
    from hpctrain.supervise import RestartLimits, SupervisedRun, Supervisor, find_allocation

    refuse_program_on_stdin(command)  # a second start would find it read
    allocation = find_allocation(os.environ)
    recipe = read_train_command(command)
    directory = run_directory or (recipe.run_directory if recipe is not None else None)
    if directory is None:
        raise UsageError(
            "where the run keeps its records is not known: give --run-directory, or a command of the form "
            "`hpctrain train RECIPE`"
        )
    per_node = ranks_per_node or _ranks_per_node(
        os.environ, num_ranks=num_ranks, num_nodes=len(allocation.nodes)
    )
    run = SupervisedRun(
        command=[resolve_command(command[0]), *command[1:]],
        again=() if recipe is None else ("--resume", "auto"),
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        directory=directory.absolute(),
        checkpoints=(directory / "checkpoints" if recipe is None else recipe.checkpoints).absolute(),
        start_within_s=None if recipe is None else start_within_s,
        check_paths=[
            str(path.absolute()) for path in (*(check_path or ()), *(recipe.paths if recipe else ()))
        ],
        check_script=None if check is None else str(check.absolute()),
        check_timeout_s=check_timeout_s,
        fork_server=None
        if fork_server is False
        else ForkServer(lingers_s=_SERVER_LINGERS_S, by_default=fork_server is None),
    )
    limits = RestartLimits(
        max_restarts=max_restarts,
        node_budget=node_budget,
        exclude_for_s=exclude_hours * 3600,
        max_without_progress=max_without_progress,
        min_nodes=min_nodes,
    )
    supervisor = Supervisor(
        run, allocation=allocation, limits=limits, machine=survey_machine(), environ=os.environ
    )
    raise typer.Exit(supervisor.run())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCommand:
    """What the supervisor needs to know of a command `hpctrain train RECIPE ...`.

    checkpoints: folder of the checkpoints. paths: paths that the ranks read: the recipe and the datasets.
    """

    run_directory: Path
    checkpoints: Path
    paths: tuple[Path, ...]


def read_train_command(command: Sequence[str]) -> TrainCommand | None:
    """Returns what the supervisor needs to know of `hpctrain train RECIPE ...`; None for any other command.

    `python -m hpctrain` counts as `hpctrain`. Raises RecipeError if the recipe cannot be read.
    """
    if Path(command[0]).name.startswith("python") and list(command[1:3]) == ["-m", "hpctrain"]:
        command = command[2:]
    if [Path(word).name for word in command[:2]] != ["hpctrain", "train"]:
        return None
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume")
    parser.add_argument("recipe", type=Path, nargs="?")
    try:
        found, _ = parser.parse_known_args(command[2:])
    except argparse.ArgumentError:
        return None
    if found.recipe is None:
        return None
    from hpctrain.run import read_recipe_document

    document = read_recipe_document(found.recipe, overrides=found.set)
    directory = _text(document, "run", "directory")
    if directory is None:
        return None
    checkpoints = _text(document, "checkpoint", "directory")
    data = [_text(document, "data", "train"), _text(document, "data", "held_out")]
    return TrainCommand(
        run_directory=Path(directory),
        checkpoints=Path(checkpoints) if checkpoints else Path(directory, "checkpoints"),
        paths=(found.recipe, *(Path(path) for path in data if path)),
    )


def _text(document: Mapping[str, Any], section: str, key: str) -> str | None:
    table = document.get(section)
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, str) else None


def _ranks_per_node(environ: Mapping[str, str], *, num_ranks: int, num_nodes: int) -> int:
    asked = environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else -(-num_ranks // num_nodes)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        supervise_command
    )
    app()
