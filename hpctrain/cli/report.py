"""`hpctrain report RUN...`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.ranks import this_rank

if TYPE_CHECKING:
    from hpctrain.bench import ScalingDocument


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
    scaling: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `hpctrain bench scaling --json` has written.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Rate of a node's link, as 100gbit, to say how fast its reductions can be [default: what the run has "
            "measured].",
        ),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML with per_node_hour and currency, for the cost.")
    ] = None,
    slurm_energy: Annotated[
        bool, typer.Option(help="Ask Slurm's accounting (sacct) for the energy of the runs' jobs.")
    ] = False,
) -> None:
    """Tell what runs did, how fast, and why not faster: in the terminal, as a page, and as files for papers.

    \b
    hpctrain report runs/digits
    hpctrain report runs/digits-1 runs/digits-8 --html report.html
    hpctrain report runs/digits-8 --scaling sweep.json --html report.html --csv tables --png figures
    """
    from hpctrain.report import (
        check_matplotlib,
        make_report,
        read_prices,
        write_csv,
        write_html,
        write_markdown,
        write_png,
    )
    from hpctrain.scaling import parse_rate
    from hpctrain.slurm import Controller

    if this_rank() != 0:
        return
    if html is not None or png is not None:
        check_matplotlib("--html and --png need")
    found = make_report(
        runs, sweep=_sweep(scaling), prices=None if prices is None else read_prices(prices),
        slurm=Controller() if slurm_energy else None,
        link_bytes_per_s=None if link is None else parse_rate(link),
        with_plots=html is not None or png is not None,
    )  # fmt: skip
    for label, conclusions in found.conclusions:
        typer.echo(f"{label}:")
        for each in conclusions:
            typer.echo(f"  - {each.text}")
        if not conclusions:
            typer.echo("  - nothing stands out, or too little was recorded")
    for path, write in ((html, write_html), (markdown, write_markdown), (csv, write_csv), (png, write_png)):
        if path is not None:
            write(found, path)
            typer.echo(f"written: {path}")


def _sweep(path: Path | None) -> ScalingDocument | None:
    if path is None:
        return None
    from hpctrain.bench import read_scaling_document

    return read_scaling_document(path, option="--scaling")
