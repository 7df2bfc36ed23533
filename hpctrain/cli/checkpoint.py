"""`hpctrain checkpoint`: list, show, verify."""

from __future__ import annotations

import json
import math
import os
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.checkpoint.metadata import Metadata
    from hpctrain.checkpoint.verify import Verified

SHOWN_DAMAGES = 20

checkpoint_app = typer.Typer(
    help="""List, show and verify checkpoints.

\b
  hpctrain checkpoint list runs/digits/checkpoints                   what was saved
  hpctrain checkpoint show runs/digits/checkpoints                   the newest one's metadata and tensors
  hpctrain checkpoint verify runs/digits/checkpoints                 hash every byte again
  mpirun -n 8 hpctrain checkpoint verify runs/lm/checkpoints         the same, shared by 8 ranks
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@checkpoint_app.command("list")
def list_command(
    directory: Annotated[Path, typer.Argument(help="The directory that a run saves its checkpoints in.")],
    as_json: _AsJson = False,
) -> None:
    """List the checkpoints of DIRECTORY, newest first: step, time, size, ranks that wrote, structure.

    \b
    hpctrain checkpoint list runs/digits/checkpoints
    hpctrain checkpoint list runs/digits/checkpoints --json
    """
    from hpctrain.checkpoint.listing import finished_newest_first, partial_files

    if _rank() != 0:
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: give the one that holds step-*.h5")
    rows = [_row(path) for path in finished_newest_first(directory)]
    partial = [path.name for path in partial_files(directory)]
    if as_json:
        typer.echo(json.dumps({"checkpoints": rows, "unfinished": partial}, indent=1))
        return
    if not rows:
        typer.echo(f"no checkpoint in {directory}")
    else:
        typer.echo(f"{'step':>10}  {'saved (UTC)':19}  {'MB':>10}  {'ranks':>5}  structure")
    for row in rows:
        ranks = "?" if row["num_ranks"] is None else str(row["num_ranks"])
        megabytes = row["file_bytes"] / 1e6
        typer.echo(
            f"{row['step']:>10}  {row['saved'] or '?':19}  {megabytes:>10.1f}  {ranks:>5}  "
            f"{'ok' if row['error'] is None else row['error']}"
        )
    for name in partial:
        typer.echo(
            f"unfinished: {name} (being written now, or left by a killed run; the next save removes it)"
        )


@checkpoint_app.command("show")
def show_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a directory: then its newest one.")],
    as_json: _AsJson = False,
) -> None:
    """Show what a checkpoint says of itself, and its tensors. The content is not read: see verify.

    \b
    hpctrain checkpoint show runs/digits/checkpoints/step-00000050.h5
    hpctrain checkpoint show runs/digits/checkpoints --json
    """
    from hpctrain.checkpoint.read import open_checkpoint
    from hpctrain.comm.serial import SerialWorld

    if _rank() != 0:
        return
    checkpoint = open_checkpoint(path, comm=SerialWorld())
    metadata = checkpoint.metadata
    tensors = [
        {
            "name": t.name,
            "dtype": t.dtype,
            "shape": list(t.shape),
            "bytes": t.num_bytes,
            "extents": len(t.extents),
        }
        for t in metadata.tensors.values()
    ]
    about = {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "saved": _time(metadata),
        "file_bytes": checkpoint.file_bytes,
        "writer": dict(metadata.writer),
    }
    if as_json:
        typer.echo(json.dumps({**about, "document": dict(metadata.document), "tensors": tensors}, indent=1))
        return
    for key, value in about.items():
        typer.echo(f"{key}: {json.dumps(value) if isinstance(value, dict) else value}")
    typer.echo(f"document: {json.dumps(dict(metadata.document), indent=1)}")
    typer.echo(f"{len(tensors)} tensors, {sum(t.num_bytes for t in metadata.tensors.values()) / 1e6:.1f} MB:")
    # As JSON text: a name from a file that someone made up must not speak to the terminal.
    names = [json.dumps(name)[1:-1] for name in metadata.tensors]
    width = max(map(len, names), default=0)
    for name, tensor in zip(names, metadata.tensors.values(), strict=True):
        elements = f"{math.prod(tensor.shape)} elements"
        typer.echo(f"  {name:{width}}  {tensor.dtype:10} {list(tensor.shape)!s:20} {elements}")


@checkpoint_app.command("verify")
def verify_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a directory: then all of them.")],
    as_json: _AsJson = False,
) -> None:
    """Read every byte and compare it with its hash. Exit code 4 if anything is damaged.

    Started as several ranks, they share the work.

    \b
    hpctrain checkpoint verify runs/digits/checkpoints
    mpirun -n 8 hpctrain checkpoint verify runs/lm/checkpoints/step-00005000.h5
    """
    from hpctrain.checkpoint.verify import verify
    from hpctrain.comm.select import open_world

    world = open_world("auto").world
    try:
        results = verify(path, comm=world)
        if world.rank == 0:
            _print_verified(results, as_json=as_json)
    finally:
        world.close()
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


def _row(path: Path) -> dict[str, Any]:
    from hpctrain.checkpoint.listing import step_of
    from hpctrain.checkpoint.structure import read_structure

    row: dict[str, Any] = {
        "path": str(path),
        "step": step_of(path),
        "saved": None,
        "file_bytes": path.stat().st_size,
        "num_ranks": None,
        "error": None,
    }
    try:
        metadata = read_structure(path).metadata
    except CheckpointError as error:
        return {**row, "error": str(error)}
    return {**row, "saved": _time(metadata), "num_ranks": metadata.writer.get("num_ranks")}


def _time(metadata: Metadata) -> str:
    try:
        return datetime.fromtimestamp(metadata.created_unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"


def _rank() -> int:
    from hpctrain.launch import identify

    return identify(os.environ, socket.gethostname()).rank
