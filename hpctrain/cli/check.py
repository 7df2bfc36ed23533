"""The command `hpctrain check`, which compares a training with itself on ranks, in parts, resumed and repeated."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hpctrain.errors import DifferenceFound, ExitCode, HpctrainError, LaunchError, from_exit_code
from hpctrain.launch import (
    ForkServer,
    Launcher,
    identify,
    plan_launch,
    resolve_command,
    run_launch,
    survey_machine,
)

INTERRUPTED = 130  # exit code that a shell reports for a command ended by Ctrl-C


def check_command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.")],
    num_ranks: Annotated[
        Optional[int],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option(
            "-n", "--num-ranks", min=2, help="Number of ranks to start; absent under hpctrain launch."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Override a key of the recipe; may be repeated."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    launcher: Annotated[
        Launcher, typer.Option("--launcher", help="auto: srun inside a Slurm allocation, else mpirun.")
    ] = Launcher.AUTO,
    scratch: Annotated[
        Path, typer.Option(help="Folder that all nodes share, for a few checkpoints, which are removed.")
    ] = Path(),
    result: Annotated[Optional[Path], typer.Option(hidden=True)] = None,  # noqa: UP045
) -> None:
    """Compare a training with itself, and name the cause if it differs.

    Trains a few steps several times: on 1 rank and on several, with and without micro-batches, stopped and resumed, and
    twice with the same seed; in float64 if the model allows it. Prints what differs, by how much, from which step and
    tensor on, and the most probable cause. Nothing is written to the run's directory.

    \b
    hpctrain check examples/digits.toml -n 2
    hpctrain check recipe.toml -n 4 --set task.options.dropout=0.1
    hpctrain check recipe.toml -n 2 --json > check.json
    hpctrain launch -n 8 --ranks-per-node 4 --host a,b -- hpctrain check recipe.toml

    Exit code 0 if all is equal, 9 if something differs or nothing was compared, any other as for hpctrain train.
    For loops of your own: session.check.
    """
    if num_ranks is None:
        _check_here(
            recipe, overrides=overrides or [], steps=steps, as_json=as_json, scratch=scratch, result=result
        )
        return
    if identify(os.environ, socket.gethostname()).launcher != "none":
        raise LaunchError(
            "this is a rank already: leave -n out, or start hpctrain check -n without a launcher"
        )
    from hpctrain.run import load_recipe

    load_recipe(recipe, overrides=overrides or [])  # its faults are reported once, before ranks start
    options = [option for override in overrides or [] for option in ("--set", override)]
    options += ["--steps", str(steps)]
    try:
        folder = tempfile.TemporaryDirectory(
            prefix=".hpctrain-check-", dir=scratch, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise LaunchError(
            f"no folder for the check can be made in {scratch.absolute()} ({error.strerror}): give --scratch a folder "
            "that all nodes share and that can be written"
        ) from error
    with folder:
        found = _launched(recipe, options, num_ranks=num_ranks, launcher=launcher, folder=Path(folder.name))
    if as_json:
        typer.echo(json.dumps(found["json"], indent=2))
    else:
        typer.echo("\n".join(found["lines"]))
    if not found["json"]["equal"]:
        raise typer.Exit(int(ExitCode.DIFFERS))


def _launched(
    recipe: Path, options: list[str], *, num_ranks: int, launcher: Launcher, folder: Path
) -> dict[str, Any]:
    """Starts the ranks and returns the result of their check. The ranks' output goes to stderr."""
    result = folder / "result.json"
    options = [*options, "--scratch", str(folder), "--result", str(result)]
    plan = plan_launch(
        [resolve_command("hpctrain"), "check", str(recipe), *options],
        num_ranks=num_ranks, environ=os.environ, machine=survey_machine(), launcher=launcher,
        fork_server=ForkServer(by_default=True),
    )  # fmt: skip
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "wb") as output:
        outcome = run_launch(plan, environ=os.environ, messages=io.StringIO(), output=output)
    if outcome.stop_asked:
        typer.echo("hpctrain: the check was stopped", err=True)
        raise typer.Exit(INTERRUPTED)
    if outcome.exit_code != 0:
        raise typer.Exit(outcome.exit_code)
    try:
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(
            f"{result} cannot be read here ({error.strerror}): give --scratch a folder that all nodes share"
        ) from error
    if "error" in found:
        raise from_exit_code(found["exit_code"])(found["error"])
    return found


def _check_here(
    recipe: Path, *, overrides: list[str], steps: int, as_json: bool, scratch: Path, result: Path | None
) -> None:
    """Checks on the ranks that a launcher started.

    result: a file into which rank 0 writes the result, or the error that all ranks have, for the process that started
    the ranks; None: rank 0 prints the result.
    """
    from hpctrain.run import check_recipe, load_recipe

    is_rank_0 = identify(os.environ, socket.gethostname()).rank == 0
    found = load_recipe(recipe, overrides=overrides)
    try:
        report = check_recipe(found, recipe_path=recipe, steps=steps, scratch=scratch)
    except HpctrainError as error:
        if result is None or not error.agreed:
            raise
        # A launcher adds its own lines to the message of ranks that fail.
        if is_rank_0:
            _write(result, {"error": str(error), "exit_code": int(error.exit_code)})
        return
    if is_rank_0:
        if result is not None:
            _write(result, {"lines": report.lines(), "json": report.as_json()})
        else:
            typer.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))
    if result is None and not report.equal:
        raise DifferenceFound("the training differs from itself", agreed=True)


def _write(result: Path, document: dict[str, Any]) -> None:
    try:
        result.write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the result of the check cannot be written to {result} ({error.strerror}): give --scratch another folder"
        ) from error
