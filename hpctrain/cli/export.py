"""`hpctrain export`: runs, and what watches them, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.ranks import this_rank

export_app = typer.Typer(
    help="""Write a run for programs that keep track of runs, or files for programs that watch them.

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
    """Write a run's recipe, numbers by step and summary into MLflow, or what has come since the last time.

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
