"""`hpctrain checkpoint prune` and `request`: which checkpoints there are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.ranks import all_ranks, progress, this_rank


def prune_command(
    directory: Annotated[Path, typer.Argument(help="The directory that holds the checkpoints.")],
    keep: Annotated[int, typer.Option(min=1, help="So many of the newest stay.")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Those whose step this divides stay, too.")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(help="METRIC:min or METRIC:max: the best of all stays, too.")
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Delete also what killed saves left; not while a run saves there."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, say what would be.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Delete older checkpoints, once every byte of the newest has been verified.

    If the newest is damaged, the one before it is verified and stays, and so on. Exit code 4, and nothing is
    deleted, if none is whole. Ranks share the verifying.

    \b
    hpctrain checkpoint prune runs/lm/checkpoints --keep 2 --keep-every 10000 --dry-run
    hpctrain checkpoint prune runs/lm/checkpoints --keep 1 --keep-best loss:min
    """
    from hpctrain.checkpoint.operations.prune import prune
    from hpctrain.checkpoint.retention.policy import Best, Retention

    best = None if keep_best is None else Best.parse(keep_best)
    retention = Retention(last=keep, every_steps=keep_every, best=best)
    with all_ranks() as world, progress("verified", rank=world.rank) as report:
        done = prune(
            directory,
            comm=world,
            retention=retention,
            unfinished=unfinished,
            dry_run=dry_run,
            progress=report,
        )
        rank = world.rank
    if rank != 0:
        return
    if as_json:
        about = {**asdict(done), "proven": str(done.proven), "dry_run": dry_run}
        typer.echo(json.dumps(about, indent=1))
        return
    for text in done.passed_over:
        typer.echo(f"DAMAGED, kept: {text}")
    typer.echo(f"verified: {done.proven.name}")
    for name in done.kept:
        typer.echo(f"kept: {name}")
    for name in done.deleted:
        typer.echo(f"{'would be deleted' if dry_run else 'deleted'}: {name}")
    for note in done.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{done.freed_bytes / 1e6:.1f} MB {'would be freed' if dry_run else 'freed'}")


def request_command(
    run_directory: Annotated[Path, typer.Argument(help="The directory of a run (run.directory).")],
) -> None:
    """Ask a run for a checkpoint after its present step. The run looks about once a second.

    \b
    hpctrain checkpoint request runs/lm
    """
    from hpctrain.checkpoint.saving.save_requests import ask_for_save

    if this_rank() != 0:
        return
    path = ask_for_save(run_directory)
    typer.echo(f"asked by {path}: the run removes it when it saves")
