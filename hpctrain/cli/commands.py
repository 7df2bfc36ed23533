"""The table of all commands below the root, and the function that adds them."""

from __future__ import annotations

import importlib
from typing import Any

import click
import typer

_PASSES_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
# Name -> module, function, settings; of a group, name -> module, `typer.Typer`.
_COMMANDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "doctor": ("hpctrain.cli.doctor", "doctor_command", {}),
    "train": ("hpctrain.cli.train", "train_command", {}),
    "check": ("hpctrain.cli.check", "check_command", {}),
    "plan": ("hpctrain.cli.plan", "plan_command", {}),
    "launch": ("hpctrain.cli.launch", "launch_command", _PASSES_ON),
    "supervise": ("hpctrain.cli.supervise", "supervise_command", _PASSES_ON),
    "stage-environment": ("hpctrain.cli.stage_environment", "stage_environment_command", {}),
    "efficiency": ("hpctrain.cli.runs", "efficiency_command", {}),
    "trace": ("hpctrain.cli.runs", "trace_command", {}),
    "report": ("hpctrain.cli.runs", "report_command", {}),
    "top": ("hpctrain.cli.runs", "top_command", {}),
}
_GROUPS = {
    "data": ("hpctrain.cli.data", "data_app"),
    "checkpoint": ("hpctrain.cli.checkpoint.group", "checkpoint_app"),
    "bench": ("hpctrain.cli.bench.group", "bench_app"),
    "slurm": ("hpctrain.cli.slurm", "slurm_app"),
    "export": ("hpctrain.cli.runs", "export_app"),
}


def add_commands(app: typer.Typer, asked: str | None) -> None:
    """Adds the command `asked` to the root command. If there is no such command, adds all commands.

    Not all are added each time, since importing a command takes a while.
    """
    _suggest_once(app)
    names = [name for name in (*_COMMANDS, *_GROUPS) if name == asked] or [*_COMMANDS, *_GROUPS]
    for name in names:
        if name in _COMMANDS:
            module, function, settings = _COMMANDS[name]
            app.command(name, context_settings=settings)(getattr(importlib.import_module(module), function))
        else:
            module, group = _GROUPS[name]
            group_app = getattr(importlib.import_module(module), group)
            _suggest_once(group_app)
            app.add_typer(group_app, name=name)


def _suggest_once(app: typer.Typer) -> None:
    """Turns off typer's suggestions for an unknown command if click makes them too.

    click makes suggestions from 8.4 on, and typer from 0.20 on.
    """
    if hasattr(click.exceptions, "NoSuchCommand"):
        app.suggest_commands = False
        for group in app.registered_groups:
            if group.typer_instance is not None:
                _suggest_once(group.typer_instance)
