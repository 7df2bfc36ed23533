"""`hpctrain doctor`: checks the installation and the environment, and compares them between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.errors import ExitCode


def doctor_command(
    run_directory: Annotated[
        Path, typer.Option("--run-directory", help="Where runs and checkpoints would be written.")
    ] = Path("."),
    backend: Annotated[
        str, typer.Option("--backend", help="Communication backend: auto, horovod or mpi.")
    ] = "auto",
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1.0, help="Give up if the ranks are not connected by then.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and facts as JSON.")] = False,
) -> None:
    """Report what is installed and what is missing; under mpirun or srun, for all ranks, and where they differ.

    \b
    hpctrain doctor
    hpctrain launch -n 4 -- hpctrain doctor
    srun --mpi=pmix -N 2 -n 8 hpctrain doctor --run-directory /scratch/runs

    Exit code: 0 if there are no problems (warnings allowed), 5 if there is one.
    """
    from hpctrain.cli.doctor_report import report
    from hpctrain.run import Severity

    level = report(run_directory=run_directory, backend=backend, timeout_s=timeout_s, as_json=as_json)
    if level is Severity.PROBLEM:
        raise typer.Exit(int(ExitCode.LAUNCH))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(doctor_command)
    app()
