"""Helpers of commands that run on several ranks: opening the world, and progress on rank 0."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from hpctrain.errors import HpctrainError

if TYPE_CHECKING:
    from hpctrain.comm import World

LINE_INTERVAL_S = 5.0


def this_rank() -> int:
    """Returns this process's rank from the launcher's environment variables. Does not start MPI."""
    from hpctrain.launch import identify

    return identify(os.environ, socket.gethostname()).rank


@contextmanager
def all_ranks() -> Iterator[World]:
    """Opens the world of the ranks that the launcher started; closes it on exit and after an agreed error. Collective.

    An error on one rank ends the other ranks too. After an HpctrainError the launcher ends them; after any other
    exception `World.abort` does.
    """
    from hpctrain.comm import open_world

    world = open_world("auto").world
    try:
        yield world
    except HpctrainError as error:
        if error.agreed or world.num_ranks == 1:
            world.close()
        raise  # if not agreed: the launcher ends the other ranks when this one exits
    except BaseException:
        if world.num_ranks > 1:
            traceback.print_exc()
            world.abort(1)
        raise
    world.close()


@contextmanager
def progress(verb: str, *, rank: int) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback that takes (bytes done, bytes in total) and shows the progress of rank 0's own work on stderr.

    On a terminal it shows a bar, else it prints a line every LINE_INTERVAL_S seconds. On other ranks it does nothing.
    """
    if rank != 0:
        yield lambda done, total: None
        return
    if sys.stderr.isatty():
        with _bar(verb) as callback:
            yield callback
        return
    begin_s = time.monotonic()
    next_line_s = begin_s + LINE_INTERVAL_S

    def line(done: int, total: int) -> None:
        nonlocal next_line_s
        now_s = time.monotonic()
        if now_s >= next_line_s and total:
            next_line_s = now_s + LINE_INTERVAL_S
            speed = done / 1e6 / (now_s - begin_s)
            typer.echo(
                f"{verb}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {100 * done / total:.0f}%, {speed:,.0f} MB/s",
                err=True,
            )

    yield line


@contextmanager
def _bar(verb: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns: list[Any] = [
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(verb, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
