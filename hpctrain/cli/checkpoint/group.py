"""The command group `hpctrain checkpoint`, with its commands `verify`, `copy`, `prune` and `request`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.checkpoint.convert import (
    export_command,
    export_dcp_command,
    import_command,
    import_dcp_command,
)
from hpctrain.cli.checkpoint.inspect import diff_command, list_command, show_command
from hpctrain.cli.ranks import all_ranks, progress, this_rank
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.checkpoint import Verified

# `hpctrain checkpoint verify`.


SHOWN_DAMAGES = 20


def verify_command(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, or a directory, to verify all checkpoints in it.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read every byte and compare it with its hash. Exit code 4 if anything is damaged.

    Several ranks share the work.

    \b
    hpctrain checkpoint verify runs/digits/checkpoints
    mpirun -n 8 hpctrain checkpoint verify runs/lm/checkpoints/step-00005000.h5
    """
    from hpctrain.checkpoint import verify

    with all_ranks() as world:
        with progress("verified", rank=world.rank) as report:
            results = verify(path, comm=world, progress=report)
        if world.rank == 0:
            _print_verified(results, as_json=as_json)
    damaged = [result for result in results if result.damage]
    if damaged:
        lines = [f"{result.path.name}: {line}" for result in damaged for line in result.damage]
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise CheckpointError(
            f"{len(damaged)} of {len(results)} checkpoint{'s' if len(results) > 1 else ''} damaged: "
            f"{'; '.join(lines[:3])}{more}",
            agreed=True,
        )


def _print_verified(results: list[Verified], *, as_json: bool) -> None:
    if as_json:
        rows = [
            {"path": str(r.path), "file_bytes": r.file_bytes, "ok": not r.damage, "damage": list(r.damage)}
            for r in results
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    for result in results:
        state = "DAMAGED" if result.damage else "ok"
        typer.echo(f"{result.path}: {state}, {result.file_bytes / 1e6:.1f} MB")
        for line in result.damage[:SHOWN_DAMAGES]:
            typer.echo(f"  {line}")
        if len(result.damage) > SHOWN_DAMAGES:
            typer.echo(f"  and {len(result.damage) - SHOWN_DAMAGES} more")


# `hpctrain checkpoint copy`.


def copy_command(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or a directory, for its newest checkpoint.")],
    directory: Annotated[Path, typer.Argument(help="The directory to copy into.")],
    files: Annotated[
        int | None,
        typer.Option(
            min=1, help="1: one file; K: a folder of K files [default: the files as they are, byte for byte]."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an existing checkpoint of this step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Copy a checkpoint to another directory, named after its step. Exit code 4 if it is damaged.

    The copy appears under its name once it is on disk and every byte is verified. Ranks share the work.

    \b
    hpctrain checkpoint copy runs/lm/checkpoints archive
    hpctrain checkpoint copy runs/lm/checkpoints/step-00005000 archive --files 1
    mpirun -n 8 hpctrain checkpoint copy runs/lm/checkpoints archive --files 4
    """
    from hpctrain.checkpoint import copy_checkpoint

    with all_ranks() as world, progress("copied", rank=world.rank) as report:
        copied = copy_checkpoint(source, directory, comm=world, files=files, replace=replace, progress=report)
        rank = world.rank
    if rank != 0:
        return
    if as_json:
        about = {"path": str(copied.path), "bytes": copied.num_bytes, "note": copied.note}
        typer.echo(json.dumps(about, indent=1))
    else:
        typer.echo(f"{copied.path}: {copied.num_bytes / 1e6:.1f} MB, verified; {copied.note}")


# `hpctrain checkpoint prune` and `request`: delete old checkpoints, ask a run for a new one.


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
        typer.Option(
            "--unfinished",
            help="Also delete files that killed saves have left. Do not use this while a run saves there.",
        ),
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
    """Ask a run for a checkpoint after its current step. The run checks for requests about once per second.

    \b
    hpctrain checkpoint request runs/lm
    """
    from hpctrain.checkpoint import ask_for_save

    if this_rank() != 0:
        return
    path = ask_for_save(run_directory)
    typer.echo(f"wrote the request {path}: the run removes it when it saves")


# `hpctrain checkpoint`: the group of checkpoint commands.


checkpoint_app = typer.Typer(
    help="""List, show, verify, compare, convert, copy and delete checkpoints; ask a run for one.

\b
  hpctrain checkpoint list runs/digits/checkpoints                   steps, times, sizes
  hpctrain checkpoint show runs/digits/checkpoints                   the newest one's metadata and tensors
  hpctrain checkpoint verify runs/digits/checkpoints                 hash every byte again
  mpirun -n 8 hpctrain checkpoint verify runs/lm/checkpoints         the same, shared by 8 ranks
  hpctrain checkpoint diff A.h5 B.h5                                 which tensors differ, and by how much
  hpctrain checkpoint export runs/lm/checkpoints --to lm.safetensors --weights
  hpctrain checkpoint import lm.safetensors start --step 0           a checkpoint that weights_from can load
  hpctrain checkpoint import-dcp fsdp/step-500 start --step 500      from torch.distributed.checkpoint
  hpctrain checkpoint export-dcp runs/lm/checkpoints fsdp/start      for torch.distributed.checkpoint
  hpctrain checkpoint copy runs/lm/checkpoints archive               the newest one, verified
  hpctrain checkpoint prune runs/lm/checkpoints --keep 2 --dry-run   what would be deleted
  hpctrain checkpoint request runs/lm                                ask a run for a checkpoint now

\b
Given a folder of checkpoints, a command uses the newest one. All commands but show and list share work between ranks.
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

checkpoint_app.command("list")(list_command)
checkpoint_app.command("show")(show_command)
checkpoint_app.command("verify")(verify_command)
checkpoint_app.command("diff")(diff_command)
checkpoint_app.command("export")(export_command)
checkpoint_app.command("import")(import_command)
checkpoint_app.command("export-dcp")(export_dcp_command)
checkpoint_app.command("import-dcp")(import_dcp_command)
checkpoint_app.command("copy")(copy_command)
checkpoint_app.command("prune")(prune_command)
checkpoint_app.command("request")(request_command)
