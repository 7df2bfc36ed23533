"""`hpctrain trace RUN -o trace.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.ranks import this_rank
from hpctrain.errors import UsageError


def trace_command(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    horovod: Annotated[
        Path | None,
        typer.Option(
            "--horovod", metavar="FILE", help="Add Horovod's own timeline: what HOROVOD_TIMELINE named."
        ),
    ] = None,
) -> None:
    """Merge what the ranks traced of the steps in telemetry.trace_steps into one file, on one clock.

    The file is Chrome's JSON: open it at ui.perfetto.dev, or in chrome://tracing.

    \b
    hpctrain train recipe.toml --set telemetry.trace_steps=100-105
    hpctrain trace runs/digits -o trace.json
    hpctrain trace runs/digits -o trace.json --horovod timeline.json
    """
    from hpctrain.scaling import chrome_trace, read_horovod_timeline, read_traces

    if this_rank() != 0:
        return
    traces = read_traces(run)
    merged = chrome_trace(traces, horovod=read_horovod_timeline(horovod) if horovod is not None else [])
    try:
        output.write_text(json.dumps(merged), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from error
    spans = [span for trace in traces for span in trace.spans]
    steps = sorted({span.step for span in spans})
    error_us = max(trace.error_s for trace in traces) * 1e6
    typer.echo(
        f"{output}: {len({trace.rank for trace in traces})} ranks, {len(steps)} steps from {steps[0]} to {steps[-1]}, "
        f"{len(spans):,} spans; clocks compared to within {error_us:.0f} us"
    )
