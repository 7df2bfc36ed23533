"""`hpctrain efficiency RUN`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.ranks import this_rank

if TYPE_CHECKING:
    from hpctrain.scaling import Efficiency, Scaling

# Of more ranks the table has those that waited least, and the JSON all.
_MOST_RANKS = 16


def efficiency_command(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    reference: Annotated[
        Path | None,
        typer.Option(
            help="The directory of the run to compare with, usually the same training on fewer ranks."
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST",
            help="Only these steps, with the parts of each rank; needs the records of all ranks. Otherwise all steps "
            "since the last start of the run, from its summary.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where the time of a run's ranks went, and its POP efficiencies: what each is, guides/efficiency.md says.

    \b
    hpctrain efficiency runs/digits-8
    hpctrain efficiency runs/digits-8 --steps 100-200
    hpctrain efficiency runs/digits-8 --reference runs/digits-1
    """
    from hpctrain.scaling import against, document_of, efficiency_of, read_efficiency, read_step_times

    if this_rank() != 0:
        return
    by_rank: list[dict[str, float]] = []
    if steps is None:
        found = read_efficiency(run)
        document = found.document()
    else:
        first, last = _range(steps)
        times = read_step_times(run, first=first, last=last)
        found, document = efficiency_of(times), document_of(times)
        by_rank = document["by_rank"]
    scaling = against(found, reference=read_efficiency(reference)) if reference is not None else None
    if as_json:
        typer.echo(
            json.dumps({**document, **({"scaling": _scaling_document(scaling)} if scaling else {})}, indent=1)
        )
        return
    _print_parts(found, by_rank)
    _print_factors(found, scaling)


def _range(text: str) -> tuple[int, int]:
    from hpctrain.scaling import parse_trace_steps

    try:
        (found,) = parse_trace_steps(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not like '100-200'") from error
    return found.start, found.stop - 1


def _print_parts(found: Efficiency, by_rank: list[dict[str, float]]) -> None:
    typer.echo(
        f"{found.steps} steps of {found.step_s * 1e3:.2f} ms on {found.ranks} ranks; ms in a step, mean of the ranks"
    )
    shown = sorted(range(len(by_rank)), key=lambda rank: by_rank[rank]["waiting"])[:_MOST_RANKS]
    typer.echo(f"{'':20}{'ms':>9}{'share':>8}" + "".join(f"{f'rank {rank}':>11}" for rank in sorted(shown)))
    for name, seconds in found.parts.items():
        ranks = "".join(f"{by_rank[rank][name] * 1e3:11.2f}" for rank in sorted(shown))
        typer.echo(f"{name.replace('_', ' '):20}{seconds * 1e3:9.2f}{seconds / found.step_s:8.1%}{ranks}")


def _print_factors(found: Efficiency, scaling: Scaling | None) -> None:
    factors = found.factors
    rows: list[tuple[str, float]] = [
        ("parallel efficiency", factors.parallel),
        ("  load balance", factors.load_balance),
        ("  communication", factors.communication),
        ("    serialisation", factors.serialisation),
        ("    transfer", factors.transfer),
        ("share of computing", factors.computing),
    ]
    if scaling is not None:
        rows.insert(0, ("global efficiency", scaling.global_efficiency))
        rows += [
            ("computation scaling", scaling.computation),
            ("samples/s of a rank", scaling.relative_speed),
        ]
    for name, value in rows:
        typer.echo(f"{name:20}{value:9.1%}")


def _scaling_document(scaling: Scaling) -> dict[str, Any]:
    return {
        "computation": scaling.computation,
        "global_efficiency": scaling.global_efficiency,
        "relative_speed": scaling.relative_speed,
    }
