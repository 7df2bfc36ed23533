"""The command `hpctrain plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from hpctrain.cli.ranks import this_rank
from hpctrain.errors import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

_PLAIN_WIDTH = 200


def plan_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the run.")],
    ranks_per_node: Annotated[
        Optional[int],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option(
            min=1, help="Ranks on a node [default: slurm.tasks_per_node of the recipe, else all on one]."
        ),
    ] = None,
    memory: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="SIZE",
            help="Memory of each rank, of its GPU if it has one, as 40GB (10^9) or 40GiB (2^30).",
        ),
    ] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe; may be repeated."
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Show also ways that differ only in activation checkpointing or schedule."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, all ways, sizes in bytes.")] = False,
) -> None:
    """Show which ways to split the recipe's model fit into memory, what they send and cost, and which to choose.

    Runs as one process. It knows all of the recipe's section [parallel]: sharded optimizer, gradients and parameters,
    activation checkpointing, offload on GPUs, and, if the task says how, split layers (tensor), sequences between
    them, pipelines, and pipelines of split layers or sharded parameters. * marks what the recipe asks for now.

    \b
    hpctrain plan recipe.toml --ranks 8 --memory 40GB
    hpctrain plan recipe.toml --ranks 64 --ranks-per-node 4 --memory 80GiB --set run.device=cuda
    hpctrain plan recipe.toml --ranks 8 --memory 40GB --set data.micro_batches=4 --json

    Parameters, gradients and optimizer state are counted without allocating them. Activations are measured: a few
    samples of the training data go forward and backward on this machine's CPU. Without data, or if the model is too
    large for this machine, activations are left out, and a note says so.

    Exit code: 0 if a way fits, or --memory is not given; 8 if no way fits, the code with which a run would end.
    """
    from hpctrain.bench import parse_size
    from hpctrain.run import load_recipe, memory_document, memory_lines, memory_table, plan_memory

    if this_rank() != 0:
        return
    plan = plan_memory(
        load_recipe(recipe, overrides=overrides or []),
        recipe_path=recipe,
        num_ranks=ranks,
        ranks_per_node=ranks_per_node,
        memory=parse_size(memory, rounds_down=True) if memory is not None else None,
    )
    if as_json:
        typer.echo(json.dumps(memory_document(plan), indent=1))
    else:
        _show(memory_table(plan, every=every))
        for line in memory_lines(plan):
            typer.echo(line)
    if memory is not None and plan.chosen is None:
        raise typer.Exit(int(ExitCode.OUT_OF_MEMORY))


def _show(table: Table) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(table)
