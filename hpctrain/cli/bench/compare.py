"""`hpctrain bench compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.bench.show import show

FELL = 1  # exit code, as of diff(1)


def compare_command(
    old: Annotated[Path, typer.Argument(help="A document of `bench scaling` or `bench step`.")],
    new: Annotated[Path, typer.Argument(help="Another one, of the same sizes.")],
    threshold: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Relative decrease that is tolerated, such as 0.02.")
    ] = 0.0,
    alpha: Annotated[
        float,
        typer.Option(min=0.0001, max=0.5, help="Probability of a false alarm among all figures together."),
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Of the arrangements that are drawn, if they are.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the samples/s of two measurements, and end with 1 if a figure fell by more than its noise.

    \b
    hpctrain bench compare before.json after.json
    hpctrain bench compare before.json after.json --threshold 0.02 --json

    An exact permutation test over the rounds. Measure both in turns (`bench scaling --at-most 1 --resume`), so that a
    change of the machine between them is no difference. Exit codes: 0 nothing fell; 1 a figure fell; 2 they cannot be
    compared.
    """
    from hpctrain.scaling import check_scipy

    check_scipy()
    from hpctrain.bench import compare_documents, comparison_lines, comparison_table

    found = compare_documents(old, new, threshold=threshold, alpha=alpha, seed=seed)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    else:
        show(comparison_table(found), notes=comparison_lines(found))
    if found.comparison.fell:
        raise typer.Exit(FELL)
