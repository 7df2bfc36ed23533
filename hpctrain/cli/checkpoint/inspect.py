"""The commands `hpctrain checkpoint list`, `show` and `diff`."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.ranks import all_ranks, progress, this_rank
from hpctrain.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from hpctrain.checkpoint import Difference, Metadata, TensorDifference

# `hpctrain checkpoint list` and `show`: metadata of checkpoints, without reading their content.


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
    from hpctrain.checkpoint import finished_newest_first, partial_files

    if this_rank() != 0:
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: give the one that holds the checkpoints")
    rows = [_row(path) for path in finished_newest_first(directory)]
    partial = [path.name for path in partial_files(directory)]
    if as_json:
        typer.echo(json.dumps({"checkpoints": rows, "unfinished": partial}, indent=1))
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
    """Returns the metrics of the last evaluation before the save, by name. Invalid entries of the file are skipped."""
    found = metadata.document.get("quality")
    if not isinstance(found, dict):
        return {}
    return {name: v for name, v in found.items() if isinstance(v, float) and name.isprintable()}


def _time(metadata: Metadata) -> str:
    try:
        return datetime.fromtimestamp(metadata.created_unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"


# `hpctrain checkpoint diff`.


SHOWN_LINES = 40
SHOWN_CHARS = 60
DIFFERENT = 1  # exit code, as of diff(1)


def diff_command(
    first: Annotated[Path, typer.Argument(help="A checkpoint, or a directory, for its newest checkpoint.")],
    second: Annotated[Path, typer.Argument(help="The other checkpoint, or directory.")],
    prefix: Annotated[
        str, typer.Option(help="Compare only tensors whose names begin with this, and no documents.")
    ] = "",
    absolute: Annotated[
        float, typer.Option("--atol", help="Elements a and b differ if |a - b| > ATOL + RTOL * |a|.")
    ] = 0.0,
    relative: Annotated[
        float, typer.Option("--rtol", help="See --atol. If both are 0, bits are compared.")
    ] = 0.0,
    show_all: Annotated[bool, typer.Option("--all", help=f"Print more than {SHOWN_LINES} lines.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the tensors and document entries in which two checkpoints differ, and by how much.

    Exit code 0: equal; 1: different, as with diff(1); 2 and 4: they could not be compared. Ranks share the work.

    \b
    hpctrain checkpoint diff runs/a/checkpoints runs/b/checkpoints
    hpctrain checkpoint diff step-00000050.h5 step-00000100.h5 --prefix model/ --rtol 1e-5
    mpirun -n 4 hpctrain checkpoint diff one two --json
    """
    from hpctrain.checkpoint import Tolerance, compare

    if not (absolute >= 0 and relative >= 0):
        raise UsageError(f"--atol {absolute}, --rtol {relative}: a tolerance is 0 or more", agreed=True)
    with all_ranks() as world, progress("compared", rank=world.rank) as report:
        found = compare(
            first,
            second,
            comm=world,
            prefix=prefix,
            tolerance=Tolerance(absolute=absolute, relative=relative),
            progress=report,
        )
        rank = world.rank
    if rank == 0 and as_json:
        typer.echo(json.dumps(_as_json(found), indent=1))
    elif rank == 0:
        _print(found, limit=None if show_all else SHOWN_LINES)
    if not found.is_empty:
        raise typer.Exit(DIFFERENT)


def _print(found: Difference, *, limit: int | None) -> None:
    for sign, checkpoint in (("-", found.first), ("+", found.second)):
        typer.echo(f"{sign} {checkpoint.path} (step {checkpoint.step})")
    typer.echo(
        f"tensors: {found.num_same} the same, {len(found.changed)} differ, {len(found.only_in_first)} only in the "
        f"first, {len(found.only_in_second)} only in the second"
    )
    lines = [f"  {_shown(entry.name)}  {_describe(entry)}" for entry in found.changed]
    lines += [f"- {_shown(name)}" for name in found.only_in_first]
    lines += [f"+ {_shown(name)}" for name in found.only_in_second]
    _print_some(lines, limit=limit)
    if found.entries:
        typer.echo(f"document: {len(found.entries)} entries differ")
    entries = []
    for entry in found.entries:
        one, two = ("absent" if value is None else _cut(value) for value in (entry.first, entry.second))
        entries.append(f"  {_shown(entry.path)}: {one} -> {two}")
    _print_some(entries, limit=limit)


def _print_some(lines: list[str], *, limit: int | None) -> None:
    for line in lines[:limit]:
        typer.echo(line)
    if limit is not None and len(lines) > limit:
        typer.echo(f"  and {len(lines) - limit} more (--all shows them)")


def _describe(entry: TensorDifference) -> str:
    kind = entry.first if entry.first == entry.second else f"{entry.first} -> {entry.second}"
    amount = entry.amount
    if amount is None:
        return kind
    text = f"{kind}: {amount.num_different} of {amount.num_elems} elements differ, by at most {amount.max_abs:.3g}"
    if amount.num_beyond != amount.num_different:
        text += f", {amount.num_beyond} beyond the tolerance"
    if amount.relative is not None:
        text += f", relative {amount.relative:.3g}"
    if amount.num_not_finite:
        text += f", {amount.num_not_finite} of them by a non-finite amount"
    return text


def _as_json(found: Difference) -> dict[str, Any]:
    def tensor(entry: TensorDifference) -> dict[str, Any]:
        row: dict[str, Any] = {"name": entry.name, "first": entry.first, "second": entry.second}
        if entry.amount is not None:
            row |= {
                "elements": entry.amount.num_elems,
                "different": entry.amount.num_different,
                "beyond_tolerance": entry.amount.num_beyond,
                "not_finite": entry.amount.num_not_finite,
                "max_abs": entry.amount.max_abs,
                "relative": entry.amount.relative,
            }
        return row

    return {
        "equal": found.is_empty,
        "first": {"path": str(found.first.path), "step": found.first.step},
        "second": {"path": str(found.second.path), "step": found.second.step},
        "same": found.num_same,
        "changed": [tensor(entry) for entry in found.changed],
        "only_in_first": list(found.only_in_first),
        "only_in_second": list(found.only_in_second),
        "document": [
            {"path": entry.path, "first": entry.first, "second": entry.second} for entry in found.entries
        ],
    }


def _shown(name: str) -> str:
    """Escapes a name as JSON, so that a crafted file cannot send control characters to the terminal."""
    return json.dumps(name)[1:-1]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
