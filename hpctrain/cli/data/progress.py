"""Helpers of the dataset commands: a one-line summary of a dataset, and progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpctrain.cli.ranks import LINE_INTERVAL_S

if TYPE_CHECKING:
    from hpctrain.data import Manifest


def summary_of(manifest: Manifest) -> str:
    """Samples, shards and size in one line, for example `1,437 samples in 4 shards, 0.5 MB`."""
    shards = len(manifest.shards)
    what = "samples" if manifest.tokens is None else "token windows"
    megabytes = f"{manifest.file_bytes / 1e6:,.1f} MB"
    return f"{manifest.samples:,} {what} in {shards} shard{'s' if shards > 1 else ''}, {megabytes}"


class Meter:
    """Progress on stderr: bars on a terminal, else a plain line every few seconds."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._next_line = time.monotonic() + LINE_INTERVAL_S

    def __enter__(self) -> Meter:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def part(self, directory: Path) -> Callable[[int, int | None], None]:
        """Returns the progress callback (amount done, total or None) for one dataset directory."""
        if self._bars is None:
            return lambda done, total: self._line(directory, done, total)
        task = self._bars.add_task(str(directory), total=None)
        return lambda done, total: self._bars.update(task, completed=done, total=total)

    def _line(self, directory: Path, done: int, total: int | None) -> None:
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_INTERVAL_S
            share = f" of {total:,}, {100 * done / total:.0f}%" if total else ""
            typer.echo(f"{directory}: {done:,}{share}", err=True)
