"""All commands, below the root. A fork server imports this module before it forks."""

from __future__ import annotations

import typer

from hpctrain.cli.bench.group import bench_app
from hpctrain.cli.check.command import check_command
from hpctrain.cli.checkpoint.group import checkpoint_app
from hpctrain.cli.data.group import data_app
from hpctrain.cli.doctor import doctor_command
from hpctrain.cli.efficiency import efficiency_command
from hpctrain.cli.export import export_app
from hpctrain.cli.launch import launch_command
from hpctrain.cli.plan.command import plan_command
from hpctrain.cli.report import report_command
from hpctrain.cli.slurm.group import slurm_app
from hpctrain.cli.stage_environment import stage_environment_command
from hpctrain.cli.supervise import supervise_command
from hpctrain.cli.top import top_command
from hpctrain.cli.trace import trace_command
from hpctrain.cli.train import train_command


def add_commands(app: typer.Typer) -> None:
    """Adds every command to the root."""
    app.command("doctor")(doctor_command)
    app.command("train")(train_command)
    app.command("check")(check_command)
    app.command("plan")(plan_command)
    passes_on = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command("launch", context_settings=passes_on)(launch_command)
    app.command("supervise", context_settings=passes_on)(supervise_command)
    app.command("stage-environment")(stage_environment_command)
    app.command("efficiency")(efficiency_command)
    app.command("trace")(trace_command)
    app.command("report")(report_command)
    app.command("top")(top_command)
    app.add_typer(data_app, name="data")
    app.add_typer(checkpoint_app, name="checkpoint")
    app.add_typer(bench_app, name="bench")
    app.add_typer(slurm_app, name="slurm")
    app.add_typer(export_app, name="export")
