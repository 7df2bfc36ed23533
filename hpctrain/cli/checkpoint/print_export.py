"""What the commands print of an export."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hpctrain.checkpoint import Exported


def print_export(done: Exported, *, as_json: bool) -> None:
    """Prints what was exported, and where to: one line of text, or a JSON object."""
    if as_json:
        about = {
            "path": str(done.path),
            "step": done.step,
            "tensors": done.num_tensors,
            "bytes": done.num_bytes,
        }
        typer.echo(json.dumps(about, indent=1))
    else:
        typer.echo(
            f"{done.path}: {done.num_tensors} tensors of step {done.step}, {done.num_bytes / 1e6:.1f} MB"
        )
