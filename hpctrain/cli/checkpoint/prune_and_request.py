"""`hpctrain checkpoint prune` and `request`: delete old checkpoints, ask a run for a new one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.ranks import all_ranks, progress, this_rank


def prune_command(
    directory: Annotated[Path, typer.Argument(help="The directory that holds the checkpoints.")],
    keep: Annotated[int, typer.Option(min=1, help="Number of the newest checkpoints to keep.")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Keep also those whose step is a multiple of this.")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(help="METRIC:min or METRIC:max: keep also the best one by this metric.")
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Delete also files of killed saves. Not while a run saves there."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing; print what would be deleted.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Delete older checkpoints after verifying every byte of the newest.

    If the newest is damaged, the one before it is verified and kept, and so on. If all are damaged, nothing is
    deleted and the exit code is 4. Ranks share the verification.

    \b
    hpctrain checkpoint prune runs/lm/checkpoints --keep 2 --keep-every 10000 --dry-run
    hpctrain checkpoint prune runs/lm/checkpoints --keep 1 --keep-best loss:min
    """
    from hpctrain.checkpoint import Best, Retention, prune

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
    """Ask a run for a checkpoint after its current step. The run checks for requests about once a second.

    \b
    hpctrain checkpoint request runs/lm
    """
    from hpctrain.checkpoint import ask_for_save

    if this_rank() != 0:
        return
    path = ask_for_save(run_directory)
    typer.echo(f"wrote the request {path}: the run removes it when it saves")
