"""`hpctrain checkpoint verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.ranks import all_ranks, progress
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.checkpoint import Verified

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
