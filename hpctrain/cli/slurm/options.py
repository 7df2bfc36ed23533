"""Options and the connection to Slurm that the commands of `hpctrain slurm` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from hpctrain.slurm import Controller

Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045  (typer evaluates this on Python 3.10)
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe; may be repeated."),
]
Target = Annotated[
    Path, typer.Argument(help="The recipe, or the run directory.", metavar="RECIPE|RUN_DIRECTORY")
]


def controller() -> Controller:
    """Returns the connection to Slurm; it prints to stderr when it waits for a busy controller."""
    from hpctrain.slurm import Controller

    return Controller(say=lambda text: typer.echo(f"hpctrain slurm: {text}", err=True))
