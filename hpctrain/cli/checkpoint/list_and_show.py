"""`hpctrain checkpoint list` and `show`: metadata of checkpoints, without reading their content."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.ranks import this_rank
from hpctrain.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.checkpoint import Metadata

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_command(
    directory: Annotated[Path, typer.Argument(help="The directory that a run saves its checkpoints in.")],
    as_json: _AsJson = False,
) -> None:
    """List the checkpoints in DIRECTORY, newest first: step, time, size, files, ranks that wrote, structure, quality.

    \b
    hpctrain checkpoint list runs/digits/checkpoints
    hpctrain checkpoint list runs/digits/checkpoints --json
    """
    from hpctrain.checkpoint import finished_newest_first, is_spare, partial_files

    if this_rank() != 0:
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: give the one that holds the checkpoints")
    rows = [_row(path) for path in finished_newest_first(directory)]
    rest = partial_files(directory)
    partial = [path.name for path in rest if not is_spare(path)]
    spare = [path.name for path in rest if is_spare(path)]
    if as_json:
        typer.echo(json.dumps({"checkpoints": rows, "unfinished": partial, "spare": spare}, indent=1))
        return
    if not rows:
        typer.echo(f"no checkpoint in {directory}")
    else:
        typer.echo(f"{'step':>10}  {'saved (UTC)':19}  {'MB':>10}  {'files':>5}  {'ranks':>5}  structure")
    for row in rows:
        ranks = "?" if row["num_ranks"] is None else str(row["num_ranks"])
        quality = "  ".join(f"{name} {value:.6g}" for name, value in row["quality"].items())
        typer.echo(
            f"{row['step']:>10}  {row['saved'] or '?':19}  {row['file_bytes'] / 1e6:>10.1f}  "
            f"{row['num_files']:>5}  {ranks:>5}  {'ok' if row['error'] is None else row['error']}"
            + (f"  {quality}" if quality else "")
        )
    for name in partial:
        typer.echo(
            f"unfinished: {name} (being written now, or left by a killed run; the next save removes it)"
        )
    for name in spare:
        typer.echo(f"spare: {name} (disk blocks that the next save reuses; prune --unfinished deletes it)")


def show_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or a directory, for its newest checkpoint.")],
    as_json: _AsJson = False,
) -> None:
    """Show a checkpoint's metadata and list its tensors. The content is not read (see verify).

    \b
    hpctrain checkpoint show runs/digits/checkpoints/step-00000050.h5
    hpctrain checkpoint show runs/digits/checkpoints --json
    """
    from hpctrain.checkpoint import checkpoint_size, open_checkpoint
    from hpctrain.comm import SerialWorld

    if this_rank() != 0:
        return
    checkpoint = open_checkpoint(path, comm=SerialWorld())
    metadata = checkpoint.metadata
    tensors = [
        {
            "name": t.name,
            "dtype": t.dtype,
            "shape": list(t.shape),
            "bytes": t.num_bytes,
            "files": sorted({piece.file for piece in t.pieces}),
            "extents": len(t.extents),
        }
        for t in metadata.tensors.values()
    ]
    about = {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "saved": _time(metadata),
        "file_bytes": checkpoint_size(checkpoint.path),
        "num_files": 1 + len(metadata.parts),
        "id": metadata.id,
        "parent": None if metadata.parent is None else dict(metadata.parent),
        "writer": dict(metadata.writer),
    }
    if as_json:
        typer.echo(json.dumps({**about, "document": dict(metadata.document), "tensors": tensors}, indent=1))
        return
    for key, value in about.items():
        if value is not None and value != "":
            typer.echo(f"{key}: {json.dumps(value) if isinstance(value, dict) else value}")
    typer.echo(f"document: {json.dumps(dict(metadata.document), indent=1)}")
    typer.echo(f"{len(tensors)} tensors, {sum(t.num_bytes for t in metadata.tensors.values()) / 1e6:.1f} MB:")
    # Escaped as JSON: a name in a crafted file must not send control characters to the terminal.
    names = [json.dumps(name)[1:-1] for name in metadata.tensors]
    width = max(map(len, names), default=0)
    for name, tensor in zip(names, metadata.tensors.values(), strict=True):
        elements = f"{math.prod(tensor.shape)} elements"
        typer.echo(f"  {name:{width}}  {tensor.dtype:10} {list(tensor.shape)!s:20} {elements}")


def _row(path: Path) -> dict[str, Any]:
    from hpctrain.checkpoint import checkpoint_size, explained, read_structure, step_of

    row: dict[str, Any] = {
        "path": str(path),
        "step": step_of(path),
        "saved": None,
        "file_bytes": 0,
        "num_files": len(list(path.glob("data-*.h5"))) if path.is_dir() else 1,
        "num_ranks": None,
        "id": None,
        "quality": {},
        "error": None,
    }
    try:
        with explained(action="inspect", path=path):
            row["file_bytes"] = checkpoint_size(path)
        metadata = read_structure(path).metadata
    except CheckpointError as error:
        return {**row, "error": str(error)}
    num_ranks = metadata.writer.get("num_ranks")
    return {
        **row,
        "saved": _time(metadata),
        "num_ranks": num_ranks if isinstance(num_ranks, int) else None,
        "id": metadata.id,
        "quality": _quality(metadata),
    }


def _quality(metadata: Metadata) -> dict[str, float]:
    """Metrics of the last evaluation before the save, by name. Skips invalid entries: the file is not trusted."""
    found = metadata.document.get("quality")
    if not isinstance(found, dict):
        return {}
    return {name: v for name, v in found.items() if isinstance(v, float) and name.isprintable()}


def _time(metadata: Metadata) -> str:
    try:
        return datetime.fromtimestamp(metadata.created_unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"
