"""`hpctrain checkpoint copy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.ranks import all_ranks, progress


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
