"""Prints the tables of `hpctrain bench`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

from hpctrain.launch import TERMINAL_VARIABLE, find_launcher

if TYPE_CHECKING:
    from rich.table import Table

PLAIN_WIDTH = 140


def show(table: Table, *, notes: list[str]) -> None:
    from rich.console import Console

    # mpirun gives rank 0 a pseudo-terminal, 80 columns wide, even if its own output goes to a file.
    launched = find_launcher(os.environ) is not None
    on_terminal = sys.stdout.isatty() and (not launched or TERMINAL_VARIABLE in os.environ)
    console = Console(
        highlight=False,
        force_terminal=on_terminal,
        width=None if on_terminal and not launched else PLAIN_WIDTH,
    )
    console.print(table)
    for note in notes:
        typer.echo(note)
