"""`hpctrain checkpoint diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.ranks import all_ranks, progress
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.checkpoint import Difference, TensorDifference

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
    """Escapes a name as JSON: one in a crafted file must not send control characters to the terminal."""
    return json.dumps(name)[1:-1]


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
