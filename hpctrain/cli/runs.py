"""The commands `hpctrain report`, `efficiency`, `top`, `trace` and `export`, which read run directories."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.ranks import this_rank
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from hpctrain.bench import ScalingDocument
    from hpctrain.scaling import Efficiency, Scaling
    from hpctrain.top import RunFollower

# `hpctrain report RUN...`.


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories; that with the fewest ranks is the reference.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page, to be read in a browser.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write conclusions and tables.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each table as a CSV file.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write each figure as a PNG file.")
    ] = None,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write conclusions and tables with unrounded numbers."),
    ] = None,
    scaling: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file that `hpctrain bench scaling --json` has written."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Link rate of a node, such as 100gbit, for the shortest possible time of a reduction, and for advice "
            "to a run on one node [default: what the run has measured].",
        ),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML with per_node_hour and currency, for the cost.")
    ] = None,
    slurm_energy: Annotated[
        bool, typer.Option(help="Ask Slurm's accounting (sacct) for the energy of the runs' jobs.")
    ] = False,
) -> None:
    """Report what runs did, how fast, and what limits them: in the terminal, as a page, and as files for papers.

    \b
    hpctrain report runs/digits
    hpctrain report runs/digits-1 runs/digits-8 --html report.html
    hpctrain report runs/digits --link 100gbit --json report.json    # would more nodes pay?
    hpctrain report runs/digits-8 --scaling sweep.json --html report.html --csv tables --png figures
    """
    from hpctrain.launch import SlurmController
    from hpctrain.report import (
        check_matplotlib,
        make_report,
        read_prices,
        write_csv,
        write_html,
        write_markdown,
        write_png,
        write_report_json,
    )
    from hpctrain.scaling import parse_rate

    if this_rank() != 0:
        return
    if html is not None or png is not None:
        check_matplotlib("--html and --png need")
    found = make_report(
        runs, sweep=_sweep(scaling), prices=None if prices is None else read_prices(prices),
        slurm=SlurmController() if slurm_energy else None,
        link_bytes_per_s=None if link is None else parse_rate(link),
        with_plots=html is not None or png is not None,
    )  # fmt: skip
    for label, conclusions in found.conclusions:
        typer.echo(f"{label}:")
        for each in conclusions:
            typer.echo(f"  - {each.text}")
        if not conclusions:
            typer.echo("  - nothing stands out, or too little was recorded")
    outputs = (
        (html, write_html), (markdown, write_markdown), (csv, write_csv), (png, write_png), (as_json, write_report_json)
    )  # fmt: skip
    for path, write in outputs:
        if path is not None:
            write(found, path)
            typer.echo(f"written: {path}")


def _sweep(path: Path | None) -> ScalingDocument | None:
    if path is None:
        return None
    from hpctrain.bench import read_scaling_document

    return read_scaling_document(path, option="--scaling")


# `hpctrain efficiency RUN`.


# With more ranks, the table lists those that waited least; the JSON lists all.
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
    """Show how the ranks of a run spent their time, and its POP efficiencies; guides/efficiency.md explains each.

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
        f"{found.steps} steps of {found.step_s * 1e3:.2f} ms on {found.ranks} ranks; ms per step, mean over the "
        "ranks"
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
            ("samples/s per rank", scaling.relative_speed),
        ]
    for name, value in rows:
        typer.echo(f"{name:20}{value:9.1%}")


def _scaling_document(scaling: Scaling) -> dict[str, Any]:
    return {
        "computation": scaling.computation,
        "global_efficiency": scaling.global_efficiency,
        "relative_speed": scaling.relative_speed,
    }


# `hpctrain top RUN`.


_PLAIN_WIDTH = 120


def top_command(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Time between two frames.")] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Print one frame and end; this is the default where the output is not a terminal."
        ),
    ] = False,
) -> None:
    """Watch a run in the terminal: step, loss, speed, where the time goes, slow ranks, checkpoints, incidents.

    \b
    hpctrain top runs/digits
    hpctrain top runs/digits --every 10
    hpctrain top runs/digits --once

    Reads only the run directory, on any machine that sees it, and only what is new. Ctrl-C ends it, with code 0; the
    run is not affected.
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

    # A signal that ends this command must restore the terminal.
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


# `hpctrain trace RUN -o trace.json`.


def trace_command(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    horovod: Annotated[
        Path | None,
        typer.Option(
            "--horovod", metavar="FILE", help="Add Horovod's own timeline, the file of HOROVOD_TIMELINE."
        ),
    ] = None,
) -> None:
    """Merge the ranks' traces of the steps in telemetry.trace_steps into one file, on one clock.

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


# `hpctrain export`: runs, and what watches them, for other programs.


export_app = typer.Typer(
    help="""Export a run to an experiment tracker, or files for monitoring.

\b
  hpctrain export mlflow runs/digits                              into runs/digits/mlflow.db
  hpctrain export mlflow runs/digits --tracking-uri http://mlflow.example:5000 --experiment digits
  hpctrain export monitoring monitoring                           dashboards for Grafana, alert rules for Prometheus

\b
Exit codes: 0; 2 usage; 5 the store or server is not there, or refuses.
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@export_app.command("mlflow")
def mlflow_command(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            metavar="URI",
            help="MLflow's store or server, such as sqlite:////data/mlflow.db or http://mlflow.example:5000; "
            "otherwise an SQLite file in the run directory.",
        ),
    ] = None,
    experiment: Annotated[
        str, typer.Option(help="Experiment of MLflow; made if there is none.")
    ] = "hpctrain",
    name: Annotated[str | None, typer.Option(help="The run's name in MLflow; otherwise run.name.")] = None,
) -> None:
    """Write a run's recipe, numbers by step and summary into MLflow, or what is new since the last export.

    \b
    hpctrain export mlflow runs/digits && mlflow ui --backend-store-uri sqlite:///runs/digits/mlflow.db
    hpctrain export mlflow runs/digits --tracking-uri http://mlflow.example:5000 --experiment digits
    """
    from hpctrain.report import export_to_mlflow

    if this_rank() != 0:
        return
    found = export_to_mlflow(run, uri=tracking_uri, experiment=experiment, name=name)
    what = "new run" if found.new else "updated run"
    typer.echo(
        f"{what} {found.run_id} of experiment {found.experiment} in {found.uri}: {found.num_values:,} values sent"
    )


@export_app.command("monitoring")
def monitoring_command(
    folder: Annotated[Path, typer.Argument(help="Where to write; files of these names are replaced.")],
) -> None:
    """Write three dashboards for Grafana, alert rules for Prometheus, and an example of its configuration.

    \b
    hpctrain export monitoring monitoring
    promtool check config monitoring/prometheus.yml
    """
    from hpctrain.monitoring import write_monitoring

    if this_rank() != 0:
        return
    for path in write_monitoring(folder):
        typer.echo(f"written: {path}")
