"""The command `hpctrain doctor`, which checks the installation and the environment and compares them between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from hpctrain.errors import ExitCode


def doctor_command(
    run_directory: Annotated[
        Optional[Path],  # noqa: UP045  (typer evaluates this on Python 3.10)
        typer.Option(
            "--run-directory",
            help="Where runs and checkpoints would be written. Default: the current directory.",
        ),
    ] = None,
    recipe: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--recipe", help="Take the run directory and the number of checkpoints from this recipe."
        ),
    ] = None,
    checkpoint_gb: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--checkpoint-gb", min=0.0, help="Size of a checkpoint. Default: that of the newest one there."
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="Communication backend: auto, horovod or mpi.")
    ] = "auto",
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout-s", min=1.0, help="Give up if the ranks are not connected after this many seconds."
        ),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and facts as JSON.")] = False,
) -> None:
    """Report what is installed and what is missing; under mpirun or srun, for all ranks, and where they differ.

    \b
    hpctrain doctor
    hpctrain launch -n 4 -- hpctrain doctor
    srun --mpi=pmix -N 2 -n 8 hpctrain doctor --run-directory /scratch/runs
    hpctrain doctor --recipe recipe.toml --checkpoint-gb 12

    Exit code: 0 if there are no problems (warnings allowed), 5 if there is one.
    """
    from hpctrain.cli.doctor_report import report
    from hpctrain.run import Severity, load_recipe

    directory, num_checkpoints = Path("."), 3
    if recipe is not None:
        wanted = load_recipe(recipe)
        directory, num_checkpoints = Path(wanted.run.directory), wanted.checkpoint.keep
    level = report(
        run_directory=run_directory or directory,
        num_checkpoints=num_checkpoints,
        checkpoint_bytes=int(checkpoint_gb * 1e9) if checkpoint_gb else None,
        backend=backend,
        timeout_s=timeout_s,
        as_json=as_json,
    )
    if level is Severity.PROBLEM:
        raise typer.Exit(int(ExitCode.LAUNCH))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(doctor_command)
    app()
