"""`hpctrain top RUN`."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.ranks import this_rank

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from hpctrain.top import RunFollower

_PLAIN_WIDTH = 120


def top_command(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Time between two frames.")] = 2.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one frame and end; so it is where the output is no terminal."),
    ] = False,
) -> None:
    """Watch a run in the terminal: step, loss, speed, where the time goes, slow ranks, checkpoints, incidents.

    \b
    hpctrain top runs/digits
    hpctrain top runs/digits --every 10
    hpctrain top runs/digits --once

    Reads only the run directory, on any machine that sees it, and only what is new. Ctrl-C ends it, with code 0; the
    run notices nothing.
    """
    from rich.console import Console

    from hpctrain.errors import UsageError
    from hpctrain.top import RunFollower

    if this_rank() != 0:
        return
    follower = RunFollower(run)
    console = Console(highlight=False)
    if once or not console.is_terminal or console.is_dumb_terminal:
        console = Console(highlight=False, width=None if console.is_terminal else _PLAIN_WIDTH)
        try:
            console.print(_frame(follower, console))
        except OSError as error:
            raise UsageError(f"{run} cannot be read: {error}") from error
        return
    _watch(follower, console, every_s=every)


def _watch(follower: RunFollower, console: Console, *, every_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    # A signal that ends this command must give the terminal back as it was.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    frame: RenderableType = Text("reading the run directory")
    try:
        with Live(frame, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                try:
                    frame = _frame(follower, console)
                    live.update(frame, refresh=True)
                except OSError as error:  # a filesystem that does not answer for a while
                    live.update(Text(f"cannot be read: {error}", style="bold red"), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        console.print(frame)


def _frame(follower: RunFollower, console: Console) -> RenderableType:
    from hpctrain.top import draw

    state = follower.refresh(now=time.time())
    return draw(state, width=console.width, ascii_only=console.options.ascii_only)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
