"""The command `hpctrain stage-environment`, which packs the Python environment into one archive for nodes' disks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.launch import describe_use, pack_environment
from hpctrain.telemetry import tell


def stage_environment_command(
    archive: Annotated[Path, typer.Argument(help="Archive to write (tar), on the shared filesystem.")],
    with_python: Annotated[
        bool | None,
        typer.Option(
            "--with-python/--without-python",
            help="Pack the interpreter and its standard library too. Default: if they are on a shared filesystem.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Pack the environment that this command runs in, and print how a batch script unpacks it on every node.

    Importing the packages of a run looks up thousands of paths. Where they are on a shared filesystem, every rank does
    that there at the same moment. The archive is read once per node, and imports then stay on the node.

    \b
    hpctrain stage-environment /shared/environment.tar
    hpctrain stage-environment /shared/environment.tar --with-python

    Run it again after packages have changed. Exit code: 0, or 5 if it cannot be packed.
    """
    packed = pack_environment(archive, with_python=with_python, progress=lambda n: tell(f"{n:,} files"))
    what = " with the interpreter and its library" if packed.with_python else ""
    tell(f"{archive}: {packed.num_files:,} files, {packed.num_bytes / 1e6:,.0f} MB{what}")
    if packed.editable:
        tell(
            f"not packed: {', '.join(packed.editable)}, installed in editable mode: imported from the source as "
            "before; install it without -e and pack again"
        )
    tell("In the batch script, before the ranks are started:\n")
    tell(describe_use(archive.absolute()), end="")
